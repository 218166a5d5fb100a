"""One of several front-end processes: what `workers` starts.

python -m octavo.server.worker
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from octavo.engine.remote_engine import RemoteEngine
from octavo.server.app import create_app
from octavo.server.peers import Peers
from octavo.server.serving import run
from octavo.server.workers import read_settings


def main() -> None:
    """Serve on the socket that was handed over until told to stop, or until the parent is gone."""
    settings = read_settings()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    engine = RemoteEngine.start(settings.config, Path(settings.state), settings.front)
    listener = socket.socket(fileno=settings.listener)
    app = create_app(engine, settings.server, settings.config, host=settings.host)
    app.state.peers = Peers(Path(settings.state).parent, settings.front)
    run(app, listener, settings.server, on_ready=_say_ready, on_drain=lambda _: None)


def _say_ready() -> None:
    print("ready", flush=True)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
