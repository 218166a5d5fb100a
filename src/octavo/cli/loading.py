"""Loading a model where a person watches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.logging import RichHandler

from octavo.cli.terminal import escape
from octavo.config.resolve import Resolved

if TYPE_CHECKING:
    from octavo.engine.model_info import ModelInfo

T = TypeVar("T")


def load(console: Console, resolved: Resolved, make: Callable[[], T], info: Callable[[T], ModelInfo]) -> T:
    """Build an engine with `make` and say in one line what was loaded."""
    handler = RichHandler(console=console, show_path=False, show_time=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    _fetch(resolved)
    # Quantising shows a bar of its own.
    quantises = resolved.config.quantization != "none"
    with nullcontext() if quantises else console.status(f"Loading {escape(resolved.config.model)} ..."):
        engine = make()
    loaded = info(engine)
    gib = loaded.bill.total / (1 << 30)
    blocks = f"{loaded.bill.num_blocks} KV blocks, {gib:.2f} GiB in all"
    console.print(
        f"[bold]{escape(loaded.name)}[/]  backend {loaded.backend}, weights {loaded.weight_formats}, "
        f"KV {loaded.kv_dtype}, context {loaded.max_model_len}, {blocks}, "
        f"loaded in {loaded.load_seconds:.1f} s"
    )
    return engine


def _fetch(resolved: Resolved) -> None:
    """Download first, with its own progress bar, so that it isn't hidden by a spinner."""
    from octavo.weights.sources import resolve_model

    config = resolved.config
    resolve_model(config.model, config.cache_path, progress=True, offline=config.offline)
