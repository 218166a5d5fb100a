"""Pauses of the collector and the loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

from octavo.observability.runtime import GCWatch, LoopWatch

#: A heap as a server has after it loaded: how long a full collection takes, before and after.
SETTLE = """
import gc, time
from octavo.observability.runtime import settle_garbage_collector
heap = [[i, [i]] for i in range(400_000)]
def collect():
    began = time.perf_counter(); gc.collect(); return time.perf_counter() - began
collect()
before = min(collect() for _ in range(3))
settle_garbage_collector()
after = min(collect() for _ in range(3))
assert gc.get_freeze_count() > 400_000
assert gc.get_threshold()[0] > 700
assert gc.isenabled()
assert after < before / 5, (before, after)
ring = []; ring.append(ring); del ring
assert gc.collect() >= 1  # rubbish made later is still found
"""


def test_collections_are_counted_by_generation() -> None:
    callbacks, watch = len(gc.callbacks), GCWatch()
    try:
        before = [pauses.count for pauses in watch.snapshot()]
        gc.collect(0)
        gc.collect(2)
        gc.collect(2)
        counts = [pauses.count for pauses in watch.snapshot()]
    finally:
        watch.close()
    assert counts[2] >= before[2] + 2
    assert counts[0] >= before[0] + 1
    assert watch.snapshot()[2].total > 0
    assert len(gc.callbacks) == callbacks
    settled = watch.snapshot()
    gc.collect()
    assert watch.snapshot() == settled


def test_a_loop_that_is_held_up_is_late() -> None:
    async def main() -> None:
        watch = LoopWatch()
        await asyncio.sleep(0.01)
        time.sleep(0.4)  # this is what is measured
        await asyncio.sleep(0.01)
        assert watch.snapshot().total > 0.25
        watch.close()
        count = watch.snapshot().count
        await asyncio.sleep(0.25)
        assert watch.snapshot().count == count

    asyncio.run(main())


def test_what_is_loaded_is_not_walked_again() -> None:
    assert subprocess.run([sys.executable, "-c", SETTLE], check=True, timeout=60).returncode == 0
