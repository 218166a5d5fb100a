"""From a plan to the arrays that a program reads.

Rule: the arrays are filled from the rows and the plan alone; nothing of the step before is left where
this step reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.base import StepInputs
from octavo.messages import RowStep, SchedulerOutput
from octavo.program.ir import BLOCK_SIZE
from octavo.runner.request_states import RequestStates


def fill(
    inputs: StepInputs, plan: SchedulerOutput, states: RequestStates, *, rope_boundary: int | None = None
) -> None:
    """Write the step inputs of a plan, sequences in its order. rope_boundary: see RopeTable."""
    if plan.num_tokens == len(plan.rows):
        _fill_decodes(inputs, plan.rows, states, rope_boundary or 0)
    else:
        _fill(inputs, plan, states, rope_boundary)


def _fill_decodes(
    inputs: StepInputs, steps: Sequence[RowStep], states: RequestStates, rope_boundary: int
) -> None:
    """Of sequences of one token each: so few numbers that numpy's calls would cost more than they do."""
    inputs.cu_q[0] = num_logits = 0
    groups = range(len(inputs.block_table))
    for i, step in enumerate(steps):
        row, position = states.row(step.request_id), step.start
        index, offset = divmod(position, BLOCK_SIZE)
        inputs.cu_q[i + 1] = i + 1
        inputs.seq_lens[i] = position + 1
        inputs.token_ids[i] = states.token_ids[row, position]
        inputs.positions[i] = position
        inputs.rope_rows[i] = position + rope_boundary if step.long_rope else position
        for group in groups:
            blocks = states.block_table[group, row, : index + 1]
            inputs.block_table[group, i, : index + 1] = blocks
            inputs.slot_mapping[group, i] = blocks[index] * BLOCK_SIZE + offset
        for _ in range(step.num_logits):
            inputs.sampled_rows[num_logits] = i
            num_logits += 1


def _fill(
    inputs: StepInputs, plan: SchedulerOutput, states: RequestStates, rope_boundary: int | None
) -> None:
    steps = plan.rows
    num_seqs, num_tokens = len(steps), plan.num_tokens
    rows = np.array([states.row(step.request_id) for step in steps])
    starts = np.array([step.start for step in steps])
    counts = np.array([step.num_tokens for step in steps])
    cu_q = np.zeros(num_seqs + 1, np.int64)
    np.cumsum(counts, out=cu_q[1:])
    inputs.cu_q[: num_seqs + 1] = cu_q
    inputs.seq_lens[:num_seqs] = starts + counts
    # Of each token: its row, its position, its block.
    row = np.repeat(rows, counts)
    position = np.arange(num_tokens) + np.repeat(starts - cu_q[:-1], counts)
    block = states.block_table[:, row, position // BLOCK_SIZE]
    inputs.token_ids[:num_tokens] = states.token_ids[row, position]
    inputs.positions[:num_tokens] = inputs.rope_rows[:num_tokens] = position
    if rope_boundary is not None:
        long_rope = np.array([step.long_rope for step in steps])
        inputs.rope_rows[:num_tokens] += rope_boundary * np.repeat(long_rope, counts)
    inputs.slot_mapping[:, :num_tokens] = block * BLOCK_SIZE + position % BLOCK_SIZE
    num_blocks = -(-int((starts + counts).max()) // BLOCK_SIZE)
    inputs.block_table[:, :num_seqs, :num_blocks] = states.block_table[:, rows, :num_blocks]
    sampled = _sampled(steps, cu_q.tolist())
    inputs.sampled_rows[: len(sampled)] = sampled


def _sampled(steps: Sequence[RowStep], first_tokens: Sequence[int]) -> list[int]:
    """Tokens whose logits are wanted: of each sequence those for logprobs of its prompt, then the last."""
    sampled: list[int] = []
    for step, token in zip(steps, first_tokens, strict=False):
        first, end = step.prompt_logits
        if first < end:
            sampled += range(token + first - step.start, token + end - step.start)
        if step.samples:
            sampled.append(token + step.num_tokens - 1)
    return sampled
