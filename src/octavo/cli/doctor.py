"""`octavo doctor`: what a model is, what would serve it, what that takes, and whether versions agree."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.cli.terminal import escape
from octavo.errors import ConfigError, InsufficientMemoryError
from octavo.platforms.versions import PackageVersion, Verdict, check_versions

if TYPE_CHECKING:  # it imports torch, and `--help` should not wait for that
    from octavo.engine.doctor import Diagnosis

_MIB = 1 << 20
_COLOURS = {Verdict.TESTED: "green", Verdict.UNTESTED: "yellow", Verdict.CLASH: "red"}


def doctor(
    model: Annotated[str | None, Parameter(help="The model to examine; also --model.")] = None,
    /,
    *,
    settings: Flags = NO_FLAGS,
) -> None:
    """Examine a model, and this installation, without loading anything."""
    resolved = resolve_settings(settings if model is None else _with_model(settings, model))
    out = Console(highlight=False, emoji=False)
    out.soft_wrap = not out.is_terminal
    versions = check_versions()
    _print_versions(out, versions)
    clashes = [
        f"{row.name} {row.installed}: {row.advice}" for row in versions if row.verdict is Verdict.CLASH
    ]
    if clashes:  # examining imports them
        raise ConfigError("versions clash: " + "; ".join(clashes))

    from octavo.engine.doctor import examine

    logging.getLogger("octavo").addHandler(logging.NullHandler())  # the diagnosis says what was declined
    diagnosis = examine(resolved.config)
    _print_diagnosis(out, diagnosis)
    if diagnosis.memory_error is not None:
        raise InsufficientMemoryError(diagnosis.memory_error)


def _with_model(settings: Flags, model: str) -> Flags:
    import dataclasses

    return dataclasses.replace(NO_FLAGS if settings is None else settings, model=model)


def _print_versions(out: Console, versions: list[PackageVersion]) -> None:
    table = _table("Versions", "package", "installed", "wanted", "tested with", "")
    for row in versions:
        verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
        advice = f": {escape(row.advice)}" if row.advice and row.verdict is Verdict.CLASH else ""
        table.add_row(
            row.name, escape(row.installed), escape(row.wanted) or "any", row.tested, verdict + advice
        )
    out.print(table)
    if any(row.verdict is Verdict.UNTESTED for row in versions):
        out.print("[dim]Not tested is no fault. If something is wrong, try a tested version first.[/]\n")


def _print_diagnosis(out: Console, found: Diagnosis) -> None:
    for title, rows in (("Model", found.model), ("Served by", found.serving)):
        table = _table(title, "", "")
        table.columns[1].overflow = "fold"  # a path is no use without its end
        for name, value in rows:
            table.add_row(name, escape(value))
        out.print(table)
    for backend, reason in found.declined.items():
        out.print(f"[yellow]{backend} declined:[/] {escape(reason)}\n")
    for note in found.notes:
        out.print(f"[yellow]note:[/] {escape(note)}\n")
    _print_memory(out, found)


def _print_memory(out: Console, found: Diagnosis) -> None:
    if found.bill is not None:
        table = _table("Memory bill", "", "MiB")
        table.columns[1].justify = "right"
        for name, nbytes in found.bill.items:
            table.add_row(name, f"{nbytes / _MIB:,.1f}")
        table.add_section()
        table.add_row("in all", f"{found.bill.total / _MIB:,.1f}")
        table.add_row("free now", f"{found.available / _MIB:,.1f}")
        out.print(table)
    if found.contexts:
        table = _table("Context", "tokens", "KV of one, MiB", "at once")
        for row in found.contexts:
            table.add_row(f"{row.length:,}", f"{row.kv_nbytes / _MIB:,.1f}", f"{row.at_once:,}")
        for column in table.columns:
            column.justify = "right"
        out.print(table)
    out.print(f"The longest sequence that free memory holds beside the model: {found.longest:,} tokens.")


def _table(title: str, *columns: str) -> Table:
    return Table(
        *columns,
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
        pad_edge=False,
    )
