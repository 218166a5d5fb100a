"""Which layers share a block table.

Rule: all groups draw equal pages from one pool, so groups are equally long where layers allow it.
A model of 4 full and 22 windowed layers gets one group of 4 and six of 4 (the last padded by 2),
not two of 4 and 22, where each block of the small group would waste 18 pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import ProgramError
from octavo.program.ir import KV, KVGroup


def assign_groups(layers: Sequence[KV]) -> tuple[KVGroup, ...]:
    """Groups of layers with the same window, full attention first; each at most as long as the
    smallest kind."""
    sizes = {layer.page_nbytes for layer in layers}
    if len(sizes) > 1:
        raise ProgramError(f"KV layers need pages of one size, but these take {sorted(sizes)} bytes")
    kinds: dict[int | None, list[int]] = {}
    for layer in layers:
        kinds.setdefault(layer.window, []).append(layer.layer)
    length = min(len(members) for members in kinds.values())
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    return tuple(
        KVGroup(window=window, layers=tuple(members[i : i + length]))
        for window, members in ordered
        for i in range(0, len(members), length)
    )
