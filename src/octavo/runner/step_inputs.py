"""From a plan to the arrays that a program reads.

Rule: the arrays are filled from the rows and the plan alone; nothing of the step before is left where
this step reads.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.base import StepInputs
from octavo.messages import SchedulerOutput
from octavo.program.ir import BLOCK_SIZE
from octavo.runner.request_states import RequestStates


def fill(
    inputs: StepInputs, plan: SchedulerOutput, states: RequestStates, *, rope_boundary: int | None = None
) -> None:
    """Write the step inputs of a plan, sequences in its order. rope_boundary: see RopeTable."""
    token = 0
    sampled = 0
    for s, step in enumerate(plan.rows):
        row = states.row(step.request_id)
        stop = step.start + step.num_tokens
        end = token + step.num_tokens
        positions = np.arange(step.start, stop, dtype=np.int32)
        inputs.token_ids[token:end] = states.token_ids[row, step.start : stop]
        inputs.positions[token:end] = positions
        inputs.rope_rows[token:end] = positions + (rope_boundary or 0) * step.long_rope
        inputs.cu_q[s] = token
        inputs.seq_lens[s] = stop
        num_blocks = -(-stop // BLOCK_SIZE)
        table = states.block_table[:, row, :num_blocks]
        inputs.block_table[:, s, :num_blocks] = table
        inputs.slot_mapping[:, token:end] = (
            table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        )
        first, last = step.prompt_logits
        inputs.sampled_rows[sampled : sampled + last - first] = token + np.arange(first, last) - step.start
        sampled += last - first
        if step.samples:
            inputs.sampled_rows[sampled] = end - 1
            sampled += 1
        token = end
    inputs.cu_q[len(plan.rows)] = token
