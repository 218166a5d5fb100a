"""Choosing tokens in the native library: rows of logits go in as addresses, ids come out.

Rule: what it computes is said in octavo/sampling/choice.py; here it only crosses the border.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.backends.native.library import Choice
from octavo.sampling_params import SamplingParams


class Chooser:
    """A library's context, and memory to work in, which grows with the vocabulary."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._scratch = np.empty(0, np.float64)

    def choose(
        self,
        context: int,
        logits: Sequence[npt.NDArray[np.float32]],
        params: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> list[int]:
        """See sampling.choice.Choose."""
        if not logits:
            return []
        choices = (Choice * len(logits))(*map(_choice, logits, params, positions))
        width = logits[0].shape[0]
        assert all(row.shape == (width,) for row in logits)
        nbytes = self._library.octavo_choice_scratch(context, width)
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(-(-nbytes // 8), np.float64)
        self._library.octavo_choose(context, choices, len(choices), width, self._scratch.ctypes.data)
        return [choice.token_id for choice in choices]


def _choice(logits: npt.NDArray[np.float32], params: SamplingParams, position: int) -> Choice:
    assert logits.dtype == np.float32
    assert logits.flags.c_contiguous
    address = logits.__array_interface__["data"][0]
    if params.greedy:
        return Choice(address)
    log_min_p = np.log(params.min_p) if params.min_p > 0.0 else -math.inf
    return Choice(address, params.seed, params.temperature, params.top_p, log_min_p, params.top_k, position)
