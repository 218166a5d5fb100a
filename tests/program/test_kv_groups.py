"""Groups of layers: equally long, so that pages of one pool serve them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ProgramError
from octavo.program.ir import KV, DType, KVGroup
from octavo.program.kv_groups import assign_groups


def layers(windows: list[int | None]) -> list[KV]:
    return [KV(i, 2, 16, DType.F16, window) for i, window in enumerate(windows)]


def test_one_kind_is_one_group() -> None:
    assert assign_groups(layers([None] * 5)) == (KVGroup(None, (0, 1, 2, 3, 4)),)
    assert assign_groups(layers([512] * 3)) == (KVGroup(512, (0, 1, 2)),)


def test_4_full_and_22_windowed_layers() -> None:
    """Gemma 3 1B: every sixth layer sees everything."""
    windows = [None if i % 6 == 5 else 512 for i in range(26)]
    groups = assign_groups(layers(windows))
    assert [group.window for group in groups] == [None, *[512] * 6]
    assert [len(group.layers) for group in groups] == [4, 4, 4, 4, 4, 4, 2]
    assert groups[0].layers == (5, 11, 17, 23)
    assert groups[1].layers == (0, 1, 2, 3)


def test_windows_of_several_sizes() -> None:
    groups = assign_groups(layers([128, None, 64, 128, None, 64, 128, None]))
    assert [(group.window, group.layers) for group in groups] == [
        (None, (1, 4)),
        (None, (7,)),
        (64, (2, 5)),
        (128, (0, 3)),
        (128, (6,)),
    ]


@given(st.lists(st.sampled_from([None, 64, 4096]), min_size=1, max_size=40))
def test_each_layer_has_one_place(windows: list[int | None]) -> None:
    groups = assign_groups(layers(windows))
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    longest = max(len(group.layers) for group in groups)
    assert longest == min(windows.count(kind) for kind in set(windows))
    for group in groups:
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert list(group.layers) == sorted(group.layers)


def test_pages_of_different_sizes_are_refused() -> None:
    kv = [KV(0, 2, 16, DType.F16), KV(1, 2, 32, DType.F16)]
    with pytest.raises(ProgramError, match=r"pages of one size, but these take \[2048, 4096\] bytes"):
        assign_groups(kv)
