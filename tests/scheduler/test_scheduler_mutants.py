"""Faults planted in the scheduler and in kv_cache/: the random load must find each of them.

A test that can't fail proves nothing. Each mutant changes a line of the real source, so a mutant whose
line is gone fails loudly too.
"""

from __future__ import annotations

import inspect
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import pytest
from test_scheduler_soak import RandomLoad

from octavo.kv_cache import block_hash, block_pool, groups, manager
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.manager import KVCacheManager
from octavo.scheduler import scheduler
from octavo.scheduler.scheduler import Scheduler

MAX_LOADS = 150
STEPS = 60


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace `old` by `new` in the source of owner.name."""
    original = inspect.getattr_static(owner, name)
    function = original.fget if isinstance(original, property) else original
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
    namespace: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, namespace)
    monkeypatch.setattr(owner, name, namespace[name])


def first_failure() -> BaseException | None:
    """What the random load finds first."""
    for seed in range(MAX_LOADS):
        try:
            RandomLoad(seed).run(STEPS)
        except (AssertionError, LookupError) as error:
            return error
    return None


def test_the_sound_source_passes() -> None:
    """The control: the same loads find nothing when nothing was planted."""
    assert all(RandomLoad(seed).run(STEPS) for seed in range(20))


MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "retiring blocks are available at once": (
        KVCacheManager,
        "_give_back",
        "self._launched_step > self._retired_step",
        "False",
    ),
    "blocks retire one step early": (
        KVCacheManager,
        "retire",
        "[0][0] <= step",
        "[0][0] <= step + 1",
    ),
    "blocks retire one step late": (
        KVCacheManager,
        "_give_back",
        "(self._launched_step, blocks)",
        "(self._launched_step + 1, blocks)",
    ),
    "undo forgets to shrink": (Scheduler, "_undo_part", "self.kv.shrink(request, part.row.start)", "pass"),
    "undo forgets the queue": (Scheduler, "_undo_part", "self._waiting.add(request)", "pass"),
    "undo does not reset the runner": (
        Scheduler,
        "undo",
        "self._dropped, self._reset = [], True",
        "self._dropped = []",
    ),
    "undo keeps pending tokens": (
        Scheduler,
        "_revert_counters",
        "part.request.num_pending -= part.row.samples",
        "pass",
    ),
    "table writes are off by one": (Scheduler, "_block_writes", "(first, ids)", "(first + 1, ids)"),
    "table writes miss the last block": (
        Scheduler,
        "_block_writes",
        "(first, ids)",
        "(first, ids[:-1])",
    ),
    "a resumed row gets its new blocks only": (
        Scheduler,
        "_block_writes",
        "if known else",
        "if True else",
    ),
    "a hit may leave nothing to compute": (
        KVCacheManager,
        "match_prefix",
        "request.first_wanted_logits",
        "(request.first_wanted_logits + 1)",
    ),
    "windows may be shorter than they are": (
        groups,
        "first_needed_block",
        "position - group.window + 1",
        "position - group.window + 17",
    ),
    "windows are not checked by a hit": (
        KVCacheManager,
        "_window_holds",
        "range(first, length)",
        "range(first + 1, length)",
    ),
    "a block is registered before it is full": (
        KVCacheManager,
        "commit",
        "full = request.num_computed_tokens",
        "full = (request.num_computed_tokens + 15)",
    ),
    "salts are ignored": (block_hash, "root_hash", "salt.encode()", 'b""'),
    "tokens are not compared, and hashes collide": (
        block_pool.BlockPool,
        "lookup",
        "block.parent != parent or block.token_ids != token_ids",
        "False",
    ),
    "poisoned blocks stay registered": (Scheduler, "_end", "self.kv.unregister(request)", "pass"),
    "eviction forgets to unregister": (BlockPool, "allocate", "self._forget(block)", "pass"),
    "references are not counted": (BlockPool, "reference", "block.ref_count += 1", "block.ref_count = 1"),
    "the budget is not charged": (Scheduler, "_put_into_plan", "draft.budget -= count", "pass"),
    "tokens in flight are forgotten on preemption": (
        Scheduler,
        "update",
        "if part.row.samples:",
        "if part.row.samples and request in self._running:",
    ),
    "the first in order may lose its blocks": (
        scheduler,
        "choose_victim",
        "if request is not first",
        "if len(running) > 1",
    ),
    "a dropped row is not dropped": (
        Scheduler,
        "_drop_row",
        "self._dropped.append(request.request_id)",
        "pass",
    ),
    "the rope's boundary is off by one": (
        Scheduler,
        "_needs_long_rope",
        "> self._rope_boundary",
        ">= self._rope_boundary",
    ),
    "tokens being sampled don't count for the rope": (
        Scheduler,
        "_needs_long_rope",
        "request.num_tokens + request.num_pending",
        "request.num_tokens",
    ),
    "who crosses the rope's boundary keeps its blocks": (
        Scheduler,
        "_schedule_running",
        "self._preempt(request)\n        return True",
        "request.long_rope = True",
    ),
    "the hashes of the other rope are kept": (
        Scheduler,
        "_choose_rope",
        "self.kv.forget(request)",
        "pass",
    ),
    "KV of both ropes passes for one": (block_hash, "root_hash", "if long_rope", "if False"),
    "more rows of logits than there are": (scheduler, "_fit", "if excess <= 0", "if True"),
    "prompt logprobs are repeated after a preemption": (
        scheduler,
        "_prompt_logits",
        "max(start, len(request.prompt_logprobs))",
        "start",
    ),
    "stop tokens are ignored": (scheduler, "_reason_to_stop", "token_id in request.stop_ids", "False"),
    "one token too many": (
        scheduler,
        "_reason_to_stop",
        ">= request.max_tokens",
        "> request.max_tokens",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant fails some load."""
    owner, function, old, new = MUTANTS[name]
    mutate(monkeypatch, owner, function, old, new)
    if isinstance(owner, ModuleType) and hasattr(manager, function):  # imported there by name
        monkeypatch.setattr(manager, function, getattr(owner, function))
    if "collide" in name:
        monkeypatch.setattr(manager, "block_hash", lambda parent, token_ids: b"the same")
    assert first_failure() is not None


def test_registering_before_the_step_retired_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are findable when they are allocated, not when they were computed."""
    original = KVCacheManager.grow

    def grow(self: KVCacheManager, request: Any, num_tokens: int) -> bool:
        grown = original(self, request, num_tokens)
        if grown and self._prefix_caching:
            full = min(num_tokens, request.num_tokens) // manager.BLOCK_SIZE
            hashes = self._hashes(request, full)
            for g, table in enumerate(self._tables[request.request_id].blocks):
                for i, block in enumerate(table[:full]):
                    if block is not None and block.key is None:
                        self.pool.register(block, (g, hashes[i]), *self._content(request, hashes, i))
        return grown

    monkeypatch.setattr(KVCacheManager, "grow", grow)
    assert first_failure() is not None
