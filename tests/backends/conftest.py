"""Rigs that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import Rig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Rig(...), whose backend is closed at the end of the test."""
    rigs: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.backend.close()
