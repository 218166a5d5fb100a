"""Rows of requests: absolute diffs, applied once or twice, and places that are used again."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.messages import NewRow, RowStep
from octavo.program.planner import Limits
from octavo.runner.request_states import RequestStates
from octavo.sampling_params import SamplingParams

LIMITS = Limits(max_tokens=64, max_seqs=3, max_sampled=3, max_model_len=40)


def new(request_id: str, prompt: list[int], output: list[int] | None = None, seed: int = 0) -> NewRow:
    return NewRow(
        request_id=request_id, prompt_ids=prompt, output_ids=output or [], params=SamplingParams(seed=seed)
    )


def step(request_id: str, *block_writes: tuple[int, list[int]]) -> RowStep:
    return RowStep(
        request_id=request_id, start=0, num_tokens=1, block_writes=list(block_writes), samples=False
    )


@pytest.fixture
def states() -> RequestStates:
    """Three rows, two layer groups."""
    return RequestStates(LIMITS, num_groups=2)


def snapshot(states: RequestStates) -> list[np.ndarray]:
    return [states.token_ids.copy(), states.block_table.copy(), states.num_prompt.copy()]


def test_a_row_holds_what_is_known(states: RequestStates) -> None:
    states.add(new("a", [5, 6, 7], [8, 9], seed=3))
    row = states.row("a")
    assert states.token_ids[row, :5].tolist() == [5, 6, 7, 8, 9]
    assert states.num_prompt[row] == 3
    assert states.sampling(row).params.seed == 3


def test_diffs_twice_are_diffs_once(states: RequestStates) -> None:
    states.add(new("other", [1]))
    states.add(new("a", [5, 6, 7], [8]))
    states.write_blocks(step("a", (0, [4, 9]), (1, [7])))
    states.write_token("a", 4, 11)
    before = snapshot(states)
    states.add(new("a", [5, 6, 7], [8, 11]))
    states.write_blocks(step("a", (0, [4, 9]), (1, [7])))
    states.write_token("a", 4, 11)
    assert all(np.array_equal(x, y) for x, y in zip(before, snapshot(states), strict=True))
    assert states.row("a") != states.row("other")


def test_block_writes_are_at_an_index_of_a_group(states: RequestStates) -> None:
    states.add(new("a", [1]))
    row = states.row("a")
    states.write_blocks(step("a", (0, [10, 11]), (1, [20])))
    states.write_blocks(step("a", (2, [12]), (0, [])))
    assert states.block_table[0, row].tolist() == [10, 11, 12]
    assert states.block_table[1, row].tolist() == [0, 20, 0]


def test_a_row_stays_in_its_place(states: RequestStates) -> None:
    for request_id in "abc":
        states.add(new(request_id, [1]))
    places = {request_id: states.row(request_id) for request_id in "abc"}
    assert sorted(places.values()) == [0, 1, 2]
    states.drop("b")
    assert states.row("a") == places["a"]
    assert states.row("c") == places["c"]
    states.add(new("d", [2, 3]))
    assert states.row("d") == places["b"], "its place is used again"
    assert states.token_ids[places["b"], :2].tolist() == [2, 3]


def test_dropping_twice_frees_once(states: RequestStates) -> None:
    for request_id in "abc":
        states.add(new(request_id, [1]))
    states.drop("b")
    states.drop("b")
    states.drop("never there")
    states.add(new("d", [1]))
    with pytest.raises(IndexError):  # the scheduler never runs more requests than there are rows
        states.add(new("e", [1]))
    assert len({states.row(request_id) for request_id in "acd"}) == 3


def test_a_dropped_row_is_gone(states: RequestStates) -> None:
    states.add(new("a", [1]))
    row = states.row("a")
    states.drop("a")
    with pytest.raises(KeyError):
        states.row("a")
    with pytest.raises(AssertionError, match="is free"):
        states.sampling(row)
    before = snapshot(states)
    states.write_token("a", 1, 9)  # its token came too late
    assert all(np.array_equal(x, y) for x, y in zip(before, snapshot(states), strict=True))


def test_reset_frees_all(states: RequestStates) -> None:
    for request_id in "abc":
        states.add(new(request_id, [1]))
    states.reset()
    for request_id in "xyz":
        states.add(new(request_id, [1]))
    assert sorted(states.row(request_id) for request_id in "xyz") == [0, 1, 2]


def test_a_token_beyond_the_context_has_no_place(states: RequestStates) -> None:
    """The last token a context holds is sampled at its end, and never read."""
    states.add(new("a", list(range(40))))
    states.write_token("a", 40, 9)
    assert states.token_ids[states.row("a")].tolist() == list(range(40))


def test_bytes(states: RequestStates) -> None:
    assert states.nbytes == 4 * (3 * 40 + 2 * 3 * 3 + 3)
