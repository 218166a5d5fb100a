"""The generated pages of docs/ say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["program.md", "settings.md", "metrics.md"])
@pytest.mark.usefixtures("smollm2_path")
def test_page_is_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (DOCS / name).read_text(encoding="utf-8") == generate.PAGES[name](), "run `make docs`"
