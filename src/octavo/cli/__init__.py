"""The `octavo` command.

One file per command, imported when the command runs: `octavo --help` answers at once.
"""

from __future__ import annotations

import sys

from cyclopts import App

import octavo

_HELP = "Serve large language models: same bits under any load."

app = App(name="octavo", help=_HELP, version=octavo.__version__, help_format="plaintext")
app.command("octavo.cli.serve:serve", help="Serve a model over HTTP, with an OpenAI-compatible API.")
app.command("octavo.cli.chat:chat", help="Talk to a model in the terminal.")
app.command("octavo.cli.generate:generate", help="Complete prompts.")


def main() -> None:
    """Run a command. Our own errors end it with one sentence and exit code 1, not a traceback."""
    from octavo.errors import OctavoError

    try:
        app()
    except OctavoError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
