"""Names of block contents."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from octavo.kv_cache.block_hash import block_hash, root_hash

blocks = st.lists(st.integers(0, 1), min_size=2, max_size=2)
contents = st.tuples(st.sampled_from(["", "a", "b", "ab"]), st.lists(blocks, max_size=3))


def chain(salt: str, blocks: list[list[int]]) -> bytes:
    """The hash of the last of some blocks."""
    digest = root_hash(salt=salt)
    for block in blocks:
        digest = block_hash(digest, block)
    return digest


@given(contents, contents)
def test_a_hash_names_the_whole_prefix_and_the_salt(
    a: tuple[str, list[list[int]]], b: tuple[str, list[list[int]]]
) -> None:
    assert (chain(*a) == chain(*b)) == (a == b)


def test_tokens_are_not_confused_with_their_bytes() -> None:
    """Large ids, and ids that a narrower encoding would run together."""
    hashes = {block_hash(b"", tokens) for tokens in ([1, 0], [0, 1], [256, 0], [1 << 16, 0], [1 << 32, 0])}
    assert len(hashes) == 5
