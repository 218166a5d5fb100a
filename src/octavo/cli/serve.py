"""`octavo serve`: a model behind an OpenAI-compatible API."""

from __future__ import annotations

import errno
import socket
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.settings import (
    NO_FLAGS,
    NO_SERVER_FLAGS,
    SERVER_GROUP,
    Flags,
    explain,
    resolve_server_settings,
    resolve_settings,
)
from octavo.cli.terminal import console
from octavo.config.resolve import Resolved, ResolvedServer
from octavo.config.server import ServerConfig
from octavo.errors import ConfigError


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.", group=SERVER_GROUP)] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes a free one.", group=SERVER_GROUP)] = 8000,
    explain_config: Annotated[
        bool,
        Parameter(
            help="Print each setting and where it came from, and exit.", group=SERVER_GROUP, negative=""
        ),
    ] = False,
    server: Flags = NO_SERVER_FLAGS,
    settings: Flags = NO_FLAGS,
) -> None:
    """Serve a model over HTTP. Ctrl-C stops the server."""
    resolved, resolved_server = resolve_settings(settings), resolve_server_settings(server)
    if explain_config:
        _explain(resolved_server, resolved)
        return
    stderr = console()
    with _bind(host, port) as listener:  # before loading: a taken port should not cost a load
        _check_access(stderr, listener, resolved_server.config)
        from octavo.engine.supervisor import EngineProcess

        config = resolved.config
        engine = load(
            stderr,
            resolved,
            lambda: EngineProcess.start(config, meanwhile=_import_server),
            lambda e: e.info,
        )
        from octavo.server.app import create_app
        from octavo.server.serving import run
        from octavo.server.workers import Workers

        url = _url(listener)

        def on_ready() -> None:
            stderr.print(f"[bold green]Ready[/] at {url}  [dim](Ctrl-C stops)[/]")

        def on_drain(seconds: float) -> None:
            stderr.print(
                f"Stopping; open answers have {seconds:g} s to end [dim](Ctrl-C again stops at once)[/]"
            )

        if config.api_workers > 1:
            workers = Workers(listener, host, config, resolved_server.config, engine)
            workers.run(on_ready=on_ready, on_drain=on_drain)
        else:
            app = create_app(engine, resolved_server.config, config, host=host)
            run(app, listener, resolved_server.config, on_ready=on_ready, on_drain=on_drain)


def _import_server() -> None:
    """It takes as long as a good part of loading a small model."""
    import octavo.server.app
    import octavo.server.serving
    import octavo.server.workers  # noqa: F401


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


def _check_access(stderr: Console, listener: socket.socket, config: ServerConfig) -> None:
    """ConfigError for bad keys; a warning where everyone is let in."""
    from octavo.server.auth import load_keys
    from octavo.server.hosts import is_loopback

    keys = load_keys(config.api_key, config.api_key_file)
    address = listener.getsockname()[0]
    if not keys and not is_loopback(address):
        stderr.print(
            f"[bold red]Warning[/] whoever can reach {address} can use this server: it has no --api-key. "
            "Give one, or listen on 127.0.0.1"
        )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _explain(server: ResolvedServer, engine: Resolved) -> None:
    rows = [("setting", "value", "from"), *explain(server), *explain(engine)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
