"""`octavo serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import errno
import socket
from typing import Annotated

from cyclopts import Group, Parameter

from octavo.cli.loading import load
from octavo.cli.settings import NO_FLAGS, Flags, explain, resolve_settings
from octavo.cli.terminal import console
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
    if explain_config:
        _explain(resolved)
        return
    stderr = console()
    with _bind(host, port) as listener:  # before loading: a taken port should not cost a load
        from octavo.engine.supervisor import EngineProcess
        from octavo.server.app import create_app
        from octavo.server.serving import run
        from octavo.server.workers import Workers

        config = resolved.config
        engine = load(stderr, resolved, lambda: EngineProcess.start(config), lambda e: e.info)
        url = _url(listener)

        def on_ready() -> None:
            stderr.print(f"[bold green]Ready[/] at {url}  [dim](Ctrl-C stops)[/]")

        def on_drain(seconds: float) -> None:
            stderr.print(
                f"Stopping; open answers have {seconds:g} s to end [dim](Ctrl-C again stops at once)[/]"
            )

        if config.api_workers > 1:
            Workers(listener, config, engine).run(on_ready=on_ready, on_drain=on_drain)
        else:
            run(create_app(engine), listener, on_ready=on_ready, on_drain=on_drain)


def _bind(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; ports are 0..65535, where 0 takes a free one")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, ValueError) as error:  # ValueError: a host that is no name at all
        listener.close()
        blame = "--port" if getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ConfigError(f"can't listen on {host}:{port}: {error}. Choose another {blame}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(resolved: Resolved) -> None:
    rows = [("setting", "value", "from"), *explain(resolved)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
