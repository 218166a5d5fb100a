"""How a front end reaches an engine core.

Rule: front ends talk in messages, `EngineRequest` in and `EngineOutput` out, so that the core can move to
another thread or process without their noticing.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError, OctavoError
from octavo.messages import EngineOutput, EngineRequest
from octavo.observability.stats import EngineStats
from octavo.request import FinishReason

logger = logging.getLogger(__name__)

#: Takes a step's outputs, and the error of an engine that stopped; called in a thread of the client.
Deliver = Callable[[list[EngineOutput]], None]
OnDeath = Callable[[BaseException], None]


class Client(Protocol):
    """An engine core that steps by itself, here or elsewhere."""

    @property
    def trouble(self) -> str | None:
        """Why no requests are served at the moment; None while they are."""

    def add(self, request: EngineRequest) -> None:
        """Hand over a request; EngineDeadError if nobody is there to take it."""

    def abort(self, request_id: str) -> None:
        """End a request early; its last output has finish_reason abort."""

    def stats(self) -> EngineStats:
        """The core at this moment, also while it is in a step. EngineDeadError if it does not say."""

    def close(self) -> None:
        """Stop the core after the step it is in, and free it."""


class InProcessClient:
    """The core in the caller's thread: outputs come from `step`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._closed = False

    def add(self, request: EngineRequest) -> None:
        """Queue a request; InvalidRequestError where it can't be served, EngineDeadError after `close`."""
        self._check_open()
        self._core.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; it produces no more output."""
        self._core.abort(request_id)

    def stats(self) -> EngineStats:
        """The core at this moment."""
        return self._core.stats()

    def step(self) -> list[EngineOutput]:
        """Run one step. EngineDeadError after `close`."""
        self._check_open()
        return self._core.step()

    def close(self) -> None:
        """Free the core. What is called later finds it closed."""
        if not self._closed:
            self._closed = True
            self._core.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("this engine was closed; make another")


class ThreadClient:
    """The core in a thread of its own, which steps while there are requests and sleeps otherwise.

    on_death is called once, should the loop ever fail.
    """

    def __init__(self, core: EngineCore, deliver: Deliver, on_death: OnDeath) -> None:
        self._core = core
        self._deliver = deliver
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[EngineRequest | str | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str | None:
        """See Client."""
        if self._thread.is_alive() and self._error is None:
            return None
        return f"the engine has stopped{_cause(self._error)}; restart the server"

    def add(self, request: EngineRequest) -> None:
        """See Client."""
        if self.trouble is not None:
            raise EngineDeadError(self.trouble)
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """See Client."""
        self._inbox.put(request_id)

    def stats(self) -> EngineStats:
        """The core at this moment, also after it stopped."""
        return self._core.stats()

    def close(self) -> None:
        """See Client."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_messages():
                outputs = self._core.step()
                if outputs:
                    self._deliver(outputs)
        except BaseException as error:
            logger.critical("the engine stopped", exc_info=error)
            self._error = error
            self._on_death(error)
        finally:
            self._core.close()

    def _take_messages(self) -> bool:
        """Apply all messages, waiting for one when there is nothing to step; False to stop."""
        while not self._core.has_requests or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, str):
                output = self._core.abort(message)
            else:
                output = add_or_refuse(self._core, message)
            if output is not None:
                self._deliver([output])
        return True


def add_or_refuse(core: EngineCore, request: EngineRequest) -> EngineOutput | None:
    """Queue a request. One that the core refuses has ended: that is its own output, and nobody else's
    concern."""
    try:
        core.add(request)
    except OctavoError as error:
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=FinishReason.ERROR,
            error=str(error),
        )
    return None


def _cause(error: BaseException | None) -> str:
    return "" if error is None else f" ({type(error).__name__}: {error})"
