"""Every error Octavo raises, in one tree.

Rule: a message says what happened, with which values, and what to do about it. Errors of
other libraries are translated at the edge where they appear.

    OctavoError
    ├── InvalidRequestError      the caller asked for something that can't be: HTTP 400
    │   └── ContextLengthError   prompt + max_tokens does not fit the model's context
    ├── QueueFullError           too many requests are under way: HTTP 429
    ├── ModelNotFoundError       no such model, here or in the catalog: HTTP 404
    ├── ConfigError              a setting, or a combination of settings, that can't work
    ├── ModelLoadError           a model that can't be read
    │   ├── CheckpointError      a file is damaged, hostile, or not what it claims to be
    │   ├── UnsupportedModelError  a sound model that no part of Octavo serves
    │   └── DownloadError        a model could not be fetched or failed verification
    ├── ProgramError             a model file built something that can't be a program
    ├── InsufficientMemoryError  the memory bill does not fit the device
    ├── BackendError             a backend failed while running a step
    ├── EngineDeadError          the engine stopped and takes no more requests: HTTP 503
    └── RemoteServerError        a server that a command talks to refused, failed or was not there
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class InvalidRequestError(OctavoError):
    """A request that can't be honoured as written. `param` names the field, where one is to blame."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The request needs more positions than the model's context holds."""

    code = "context_length_exceeded"


class QueueFullError(OctavoError):
    """As many requests are under way as are taken. `retry_after`: seconds until there may be room."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelNotFoundError(OctavoError):
    """The model named is not known here."""


class ConfigError(OctavoError):
    """A setting, or a combination of settings, that can't work."""


class ModelLoadError(OctavoError):
    """A model could not be read."""


class CheckpointError(ModelLoadError):
    """A checkpoint file is damaged, hostile, or not what it claims to be."""


class UnsupportedModelError(ModelLoadError):
    """A sound model that Octavo does not serve. The message carries every reason."""


class DownloadError(ModelLoadError):
    """A model could not be fetched, or what arrived failed verification."""


class ProgramError(OctavoError):
    """A model file, or the planner, was asked for a program that can't exist."""


class InsufficientMemoryError(OctavoError):
    """The memory bill does not fit. The message itemises it and names the flag that mends it."""


class BackendError(OctavoError):
    """A backend failed while running a step."""


class EngineDeadError(OctavoError):
    """The engine has stopped and takes no more requests."""


class RemoteServerError(OctavoError):
    """A server that a command talks to refused, failed, or was not there."""
