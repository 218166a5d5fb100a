"""`octavo pull`: fetch a model and print where it lies, or list what the catalog has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from octavo.cli.terminal import console, escape
from octavo.config.resolve import resolve

_WIDTH = 200  # of lines in a file or a pipe


def pull(
    model: Annotated[
        str | None,
        Parameter(help="Catalog name, org/name[@revision][:quantisation], modelscope:org/name ..."),
    ] = None,
    /,
    *,
    cache_dir: Annotated[
        str | None, Parameter(help="Where models are kept; Hugging Face's are in its own cache.")
    ] = None,
    offline: Annotated[bool | None, Parameter(help="Fetch nothing; say where it lies, if it does.")] = None,
) -> None:
    """Fetch a model and print its path, for `octavo serve --model`. Without a model, list the catalog.

    What is there already is not fetched again.
    """
    config = resolve({"cache_dir": cache_dir, "offline": offline}).config
    if model is None:
        _print_catalog(config.cache_path)
        return
    from octavo.weights.sources import fetch_model

    fetched = fetch_model(model, config.cache_path, progress=True, offline=config.offline)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in (
        ("model", model),
        ("revision", fetched.revision),
        ("size", f"{fetched.nbytes / 1e6:,.1f} MB"),
        ("licence", fetched.licence),
    ):
        if value:
            table.add_row(name, escape(value))
    console().print(table)
    print(fetched.path.absolute())


def _print_catalog(cache_dir: Path) -> None:
    from octavo.weights.catalog import CATALOG, is_cached

    table = Table("model", "size", "licence", "cached", "description", box=None, pad_edge=False)
    for name, entry in sorted(CATALOG.items()):
        cached = "yes" if is_cached(entry, cache_dir) else "no"
        table.add_row(
            name, f"{entry.file_bytes / 1e6:,.1f} MB", entry.licence, cached, escape(entry.description)
        )
    width = None if sys.stdout.isatty() else _WIDTH
    Console(highlight=False, emoji=False, width=width).print(table)
