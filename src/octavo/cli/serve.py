"""`octavo serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import errno
import socket
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.console import Console
from rich.table import Table

from octavo.cli.loading import load
from octavo.cli.settings import NO_FLAGS, Flags, explain, resolve_settings
from octavo.config.resolve import Resolved
from octavo.errors import ConfigError

_GROUP = Group("Server", sort_key=0)


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.", group=_GROUP)] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.", group=_GROUP)] = 8000,
    explain_config: Annotated[
        bool,
        Parameter(help="Print each setting and where it came from, and exit.", group=_GROUP, negative=""),
    ] = False,
    settings: Flags = NO_FLAGS,
) -> None:
    """Serve a model over HTTP. Ctrl-C stops the server."""
    resolved = resolve_settings(settings)
    console = Console(stderr=True, highlight=False)
    if explain_config:
        Console().print(_explanation(resolved))
        return
    listener = _listen(host, port)  # before loading: a taken port should not cost a load

    from octavo.engine.build import build_engine
    from octavo.server.app import create_app

    engine = load(console, resolved, lambda: build_engine(resolved.config), lambda e: e.info)
    _run(create_app(engine), listener, console)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        hint = (
            "Choose another with --port" if getattr(error, "errno", 0) == errno.EADDRINUSE else "Check --host"
        )
        raise ConfigError(f"can't listen on {host}:{port}: {error}. {hint}") from error
    return listener


def _run(app: Any, listener: socket.socket, console: Console) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listener.getsockname()[:2]
            console.print(f"[bold green]Ready[/] at http://{host}:{port}  [dim](Ctrl-C stops)[/]")

    config = uvicorn.Config(app, log_level="warning")
    Server(config).run(sockets=[listener])


def _explanation(resolved: Resolved) -> Table:
    table = Table("setting", "value", "from")
    for row in explain(resolved):
        table.add_row(*row)
    return table
