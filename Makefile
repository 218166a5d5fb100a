# Two commands matter: `make serve` and `make test`. Both set up .venv first and need python3 >= 3.11,
# make, and (for speed) g++.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CSRC   := $(wildcard csrc/cpu/*) $(wildcard csrc/cpu/kernels/*)

PORT  ?= 8000
MODEL ?= smollm2-135m-instruct
JOBS  ?= 2
ARGS  ?=

.DEFAULT_GOAL := help
.PHONY: help install serve test test-slow lint bench docs clean

help:  ## Show these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create .venv and install Octavo with its developer tools

# Editable: a changed .py is used at once; a changed kernel is built again.
$(STAMP): pyproject.toml $(CSRC)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $(STAMP)

serve: $(STAMP)  ## Serve a model: make serve PORT=8123 MODEL=path ARGS=...
	$(BIN)/octavo serve --port $(PORT) --model $(MODEL) $(ARGS)

test: lint  ## Lint, types and tests
	$(BIN)/python -m pytest -m "not slow and not alone" -n $(JOBS) --dist loadfile
	$(BIN)/python -m pytest -m "not slow and alone"

test-slow: $(STAMP)  ## Soak and exhaustive tests
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)  ## ruff, mypy --strict and the layering contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)  ## Benchmarks; the last line of each is JSON
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/offline.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/context.py
	$(BIN)/python benchmarks/frontend.py
	$(BIN)/python benchmarks/ops.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/compare.py

docs: $(STAMP)  ## Make the generated pages of docs/ anew
	$(BIN)/python docs/generate.py

clean:  ## Remove what was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
