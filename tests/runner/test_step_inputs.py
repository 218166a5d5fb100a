"""Step inputs against a slow reference: one token, one position at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.base import StepInputs
from octavo.messages import NewRow, RowStep, SchedulerOutput
from octavo.program.ir import BLOCK_SIZE
from octavo.program.planner import Limits
from octavo.runner.request_states import RequestStates
from octavo.runner.step_inputs import fill
from octavo.sampling_params import SamplingParams

LIMITS = Limits(max_tokens=120, max_seqs=4, max_sampled=124, max_model_len=100)
NUM_GROUPS = 2
GARBAGE = -77


@dataclass
class Drawn:
    """A sequence of a step: its tokens, its block table by group, and what it computes."""

    tokens: list[int]
    blocks: list[list[int]]
    start: int
    num_tokens: int
    samples: bool
    long_rope: bool
    prompt_logits: tuple[int, int]


@st.composite
def drawn_sequences(draw: st.DrawFn) -> list[Drawn]:
    sequences = []
    most = draw(st.sampled_from([1, 30]))  # decodes, or prompts too
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 100))
        start = draw(st.integers(0, length - 1))
        num_tokens = draw(st.integers(1, min(most, length - start)))
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        blocks = [draw(st.lists(st.integers(0, 500), min_size=num_blocks, max_size=num_blocks)) for _ in "01"]
        tokens = np.random.default_rng(length).integers(0, 1000, length).tolist()
        first = draw(st.integers(start, start + num_tokens))
        logits = (first, draw(st.integers(first, start + num_tokens)))
        samples, long_rope = draw(st.booleans()), draw(st.booleans())
        sequences.append(Drawn(tokens, blocks, start, num_tokens, samples, long_rope, logits))
    return sequences


def plan(sequences: list[Drawn]) -> SchedulerOutput:
    rows = [
        RowStep(
            request_id=str(i),
            start=s.start,
            num_tokens=s.num_tokens,
            block_writes=[(0, blocks) for blocks in s.blocks],
            samples=s.samples,
            long_rope=s.long_rope,
            prompt_logits=s.prompt_logits,
        )
        for i, s in enumerate(sequences)
    ]
    num_tokens = sum(s.num_tokens for s in sequences)
    return SchedulerOutput(step=0, reset=False, dropped=[], new_rows=[], rows=rows, num_tokens=num_tokens)


def rows_of(sequences: list[Drawn], order: list[int]) -> RequestStates:
    """Rows taken in another order than the plan's, over what a request before them left."""
    states = RequestStates(LIMITS, NUM_GROUPS)
    states.token_ids[:] = GARBAGE
    states.block_table[:] = GARBAGE
    for i in order:
        params = SamplingParams(seed=0)
        states.add(NewRow(request_id=str(i), prompt_ids=sequences[i].tokens, output_ids=[], params=params))
    for row in plan(sequences).rows:
        states.write_blocks(row)
    return states


@given(drawn_sequences(), st.randoms(use_true_random=False))
def test_against_one_token_at_a_time(sequences: list[Drawn], random: object) -> None:
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    inputs = StepInputs.allocate(LIMITS, NUM_GROUPS)
    for name in inputs.__slots__:
        getattr(inputs, name)[...] = GARBAGE  # what the step before left
    fill(inputs, plan(sequences), rows_of(sequences, order), rope_boundary=50)

    t, sampled = 0, []
    for s, sequence in enumerate(sequences):
        assert inputs.cu_q[s] == t
        for position in range(sequence.start, sequence.start + sequence.num_tokens):
            assert inputs.token_ids[t] == sequence.tokens[position]
            assert inputs.positions[t] == position
            assert inputs.rope_rows[t] == position + 50 * sequence.long_rope
            for g in range(NUM_GROUPS):
                block = sequence.blocks[g][position // BLOCK_SIZE]
                assert inputs.slot_mapping[g, t] == block * BLOCK_SIZE + position % BLOCK_SIZE
            if position in range(*sequence.prompt_logits):
                sampled.append(t)
            t += 1
        assert inputs.seq_lens[s] == sequence.start + sequence.num_tokens
        for g in range(NUM_GROUPS):
            assert inputs.block_table[g, s, : len(sequence.blocks[g])].tolist() == sequence.blocks[g]
        if sequence.samples:
            sampled.append(t - 1)
    assert inputs.cu_q[len(sequences)] == t
    assert inputs.sampled_rows[: len(sampled)].tolist() == sampled
    assert plan(sequences).num_sampled == len(sampled)


def test_allocation_is_by_the_limits() -> None:
    inputs = StepInputs.allocate(LIMITS, NUM_GROUPS)
    shapes = {name: getattr(inputs, name).shape for name in inputs.__slots__}
    assert shapes == {
        "token_ids": (120,),
        "positions": (120,),
        "rope_rows": (120,),
        "cu_q": (5,),
        "seq_lens": (4,),
        "slot_mapping": (2, 120),
        "block_table": (2, 4, 7),
        "sampled_rows": (124,),
    }
    assert {getattr(inputs, name).dtype for name in inputs.__slots__} == {np.dtype(np.int32)}
    assert inputs.nbytes == 4 * (120 + 120 + 120 + 5 + 4 + 240 + 56 + 124)
