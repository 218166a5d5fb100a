"""Which blocks a group needs, against counting."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from octavo.kv_cache.groups import blocks_for, first_needed_block
from octavo.program.ir import BLOCK_SIZE, KVGroup

windows = st.one_of(st.none(), st.integers(1, 70))


def visible(group: KVGroup, position: int) -> range:
    """Positions that a token sees."""
    return range(0 if group.window is None else max(0, position - group.window + 1), position + 1)


@given(windows, st.integers(0, 200))
def test_the_first_needed_block_has_the_first_visible_position(window: int | None, position: int) -> None:
    group = KVGroup(window, (0,))
    assert first_needed_block(group, position) == visible(group, position)[0] // BLOCK_SIZE


@given(windows, st.integers(1, 200), st.integers(1, 80))
def test_no_request_ever_holds_more_than_blocks_for(
    window: int | None, num_tokens: int, step_tokens: int
) -> None:
    """Whatever is computed and whatever is in flight."""
    group = KVGroup(window, (0,))
    most = 0
    for computed in range(num_tokens):
        scheduled = min(num_tokens, computed + step_tokens)
        most = max(most, -(-scheduled // BLOCK_SIZE) - first_needed_block(group, computed))
    bound = blocks_for(group, num_tokens, step_tokens)
    assert most <= bound <= -(-num_tokens // BLOCK_SIZE)
    assert bound <= most + 2  # and it is no wild guess
