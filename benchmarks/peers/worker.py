"""One engine in a process of its own: told by a line what to measure, it answers with a line of seconds.

Rule: imports nothing but the standard library and numpy, so that any engine's environment runs it. Between
requests the process waits for input and takes no processor time.

    measure   with                        times
    prefill   "tokens": n                 one prompt of n tokens, to its first new token
    decode    "batch": b, "steps": n      n new tokens of each of b sequences after prompts of PROMPT tokens

New tokens are the most likely ones. Prompts are random, the same for every engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Protocol

import numpy as np

PROMPT = 64
MAX_BATCH = 32
MAX_PREFILL = 512
MAX_STEPS = 64


class Engine(Protocol):
    """What a process measures."""

    def about(self) -> dict[str, Any]:
        """Versions and settings, for the report."""

    def prefill(self, tokens: int) -> float:
        """Seconds to the first new token of a prompt."""

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of `steps` new tokens of each sequence."""


def prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Token ids without any meaning."""
    ids: list[int] = np.random.default_rng(seed).integers(100, vocab_size, length).tolist()
    return ids


def parser(about: str | None) -> argparse.ArgumentParser:
    """The arguments of every engine's process."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("model")
    made.add_argument("--threads", type=int, required=True)
    return made


def serve(make: Any) -> None:
    """Build the engine, say what it is, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    engine: Engine = make()
    print(json.dumps(engine.about()), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = getattr(engine, request.pop("measure"))(**request)
        print(json.dumps(seconds), file=answers, flush=True)
