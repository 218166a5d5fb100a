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
