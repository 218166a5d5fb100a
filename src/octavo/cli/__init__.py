"""The `octavo` command.

One file per command, imported when the command runs: `octavo --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App

import octavo

_HELP = "Serve large language models: same bits under any load."
_INTERRUPTED = 130
_BROKEN_PIPE = 141

app = App(name="octavo", help=_HELP, version=octavo.__version__, help_format="plaintext")
app.command("octavo.cli.serve:serve", help="Serve a model over HTTP, with an OpenAI-compatible API.")
app.command("octavo.cli.chat:chat", help="Talk to a model, here or on a server, in the terminal.")
app.command("octavo.cli.generate:generate", help="Complete prompts.")
app.command("octavo.cli.doctor:doctor", help="Examine a model and this installation.")
app.command("octavo.cli.convert:convert", help="Write a model as safetensors, quantised or not.")
app.command("octavo.cli.pull:pull", help="Fetch a model, or list those of the catalog.")
bench = App(name="bench", help="Measure.", help_format="plaintext")
bench.command("octavo.cli.bench:serve", help="Put load on an OpenAI-compatible server and measure it.")
app.command(bench)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; `arguments` are those of the process if not given.

    Our own errors end it with one sentence and exit code 1, not a traceback.
    """
    from octavo.errors import OctavoError

    try:
        try:
            app(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except OctavoError as error:
        from octavo.cli.terminal import print_error

        print_error(error)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
