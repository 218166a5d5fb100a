"""Choosing tokens in the native library: rows of logits go in as addresses, ids come out.

Rule: what it computes is said in octavo/sampling/choice.py; here it only crosses the border. A step finds the
processor's caches full of weights, so little is touched: parameters stay written while the same request has
the row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.backends.base import Logits, LogitsRows
from octavo.backends.native.library import Choice
from octavo.sampling_params import SamplingParams


class Chooser:
    """A library's context, and memory to work in, which grows with the batch and the vocabulary."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._scratch = np.empty(0, np.float64)
        self._width = 0
        self._make_room(0)

    def choose(
        self, context: int, logits: LogitsRows, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int]:
        """See sampling.choice.Choose."""
        count = len(params)
        if not count:
            return []
        if count > len(self._rows):
            self._make_room(count)
        width = logits.shape[1] if isinstance(logits, np.ndarray) else len(logits[0])
        if width > self._width:
            self._width = width
            self._scratch = np.empty(-(-self._library.octavo_choice_scratch(context, width) // 8), np.float64)
            self._scratch_address = self._scratch.ctypes.data
        rows = self._rows[:count]
        for row, address, wanted, position in zip(
            rows, _addresses(logits, width), params, positions, strict=True
        ):
            row.write(address, wanted, position)
        self._library.octavo_choose(context, self._choices, count, width, self._scratch_address)
        return [row.choice.token_id for row in rows]

    def _make_room(self, count: int) -> None:
        self._choices = (Choice * count)()
        self._rows = [_Row(choice) for choice in self._choices]


class _Row:
    """A choice, and whose parameters are written in it."""

    __slots__ = ("choice", "params")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.params: SamplingParams | None = None

    def write(self, address: int, params: SamplingParams, position: int) -> None:
        choice = self.choice
        choice.logits, choice.position = address, position
        if params is self.params:
            return
        choice.temperature = 0.0 if params.greedy else params.temperature
        if not params.greedy:
            choice.seed = params.seed
            choice.top_p, choice.top_k = params.top_p, params.top_k
            choice.log_min_p = np.log(params.min_p) if params.min_p > 0.0 else -math.inf
        self.params = params


def _addresses(logits: LogitsRows, width: int) -> Iterable[int]:
    if not isinstance(logits, np.ndarray):
        assert all(len(row) == width for row in logits)
        return [_address(row) for row in logits]
    start = _address(logits)
    return range(start, start + logits.nbytes, width * 4)


def _address(logits: Logits) -> int:
    assert logits.dtype == np.float32
    assert logits.flags.c_contiguous
    return int(logits.__array_interface__["data"][0])
