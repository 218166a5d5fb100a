"""Drives the engines' processes: one measures while the others wait.

Each measurement says how much of the machine others took meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SETTLE_SECONDS = 0.05  # for the threads of the engine before to stop spinning


@dataclass(frozen=True)
class Measurement:
    """What a worker is asked (worker.py), and how many tokens that makes."""

    name: str
    request: dict[str, Any]
    tokens: int

    def shortened(self) -> Measurement:
        """The same with two steps, to warm up."""
        return decode(self.request["batch"], 2) if "steps" in self.request else self


def prefill(tokens: int) -> Measurement:
    """One prompt."""
    return Measurement(f"prefill of {tokens}", {"measure": "prefill", "tokens": tokens}, tokens)


def decode(batch: int, steps: int) -> Measurement:
    """Some sequences at once."""
    request = {"measure": "decode", "batch": batch, "steps": steps}
    return Measurement(f"decode, batch {batch}", request, batch * steps)


@dataclass(frozen=True)
class Sample:
    """One measurement of one engine. others: the share of the machine that other processes took."""

    tokens_per_s: float
    others: float


class Worker:
    """An engine's process."""

    def __init__(self, python: str | Path, script: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        # The number of threads is the benchmark's to say, not the caller's environment's.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._about: dict[str, Any] | None = None

    def about(self) -> dict[str, Any]:
        """What the engine says of itself. Waits until it is loaded."""
        if self._about is None:
            self._about = self._answer()
        return self._about

    def measure(self, what: Measurement) -> Sample:
        """One measurement, now."""
        self.about()
        time.sleep(_SETTLE_SECONDS)
        before, own_before, started = _busy_seconds(), self._own_seconds(), time.perf_counter()
        seconds = self._ask(what.request)
        passed = time.perf_counter() - started
        others = _busy_seconds() - before - (self._own_seconds() - own_before)
        return Sample(what.tokens / seconds, max(0.0, others / passed / (os.cpu_count() or 1)))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            sys.exit(f"{self._process.args!r} ended:\n{self._errors.read()[-4000:]}")
        return json.loads(line)

    def _own_seconds(self) -> float:
        """Processor time the process has had; 0 where there is no /proc."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """Processor time all processes have had, and what a hypervisor took; 0 where there is no /proc."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
