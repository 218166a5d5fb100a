"""What commands say to a person: on standard error, so that standard output carries results only.

Rule: values go through `escape`. A path or a prompt may hold what rich takes for markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

__all__ = ["console", "escape", "print_error"]


def console() -> Console:
    """Standard error. Lines are not cut at 80 columns where that is no terminal."""
    made = Console(stderr=True, highlight=False, emoji=False)
    made.soft_wrap = not made.is_terminal
    return made


def print_error(error: Exception) -> None:
    """Say an error in one sentence."""
    console().print(f"[bold red]error:[/] {escape(str(error))}")
