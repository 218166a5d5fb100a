"""What every backend is: a table of kernels, and a way to run a sealed program.

Rule: a backend owns no memory. The runner allocates weights, arena, KV pages and step inputs, and
a backend is told where they are. Running a step allocates nothing that the bill does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from octavo.program.ir import Weight
from octavo.program.planner import KernelTable, Limits, SealedProgram
from octavo.quantization.conversion import StoredRows
from octavo.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
#: Rows of logits [vocab]: one by one, or an array of them.
LogitsRows = Sequence[Logits] | Logits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays a step reads, allocated once at the limits; a step uses their beginnings.

    token_ids, positions [max_tokens]; rope_rows [max_tokens]: rows of the rope tables;
    cu_q [max_seqs + 1]: tokens of sequence s are [cu_q[s], cu_q[s + 1]);
    seq_lens [max_seqs]: positions known after the step (context and new);
    slot_mapping [groups, max_tokens]: block * BLOCK_SIZE + offset each token's KV is written to;
    block_table [groups, max_seqs, max_blocks]; sampled_rows [max_sampled]: tokens whose logits are
    wanted.
    """

    token_ids: Int32Array
    positions: Int32Array
    rope_rows: Int32Array
    cu_q: Int32Array
    seq_lens: Int32Array
    slot_mapping: Int32Array
    block_table: Int32Array
    sampled_rows: Int32Array

    @classmethod
    def allocate(cls, limits: Limits, num_groups: int) -> StepInputs:
        """Zeroed arrays for steps up to the limits."""

        def zeros(*shape: int) -> Int32Array:
            return np.zeros(shape, np.int32)

        return cls(
            token_ids=zeros(limits.max_tokens),
            positions=zeros(limits.max_tokens),
            rope_rows=zeros(limits.max_tokens),
            cu_q=zeros(limits.max_seqs + 1),
            seq_lens=zeros(limits.max_seqs),
            slot_mapping=zeros(num_groups, limits.max_tokens),
            block_table=zeros(num_groups, limits.max_seqs, limits.max_blocks),
            sampled_rows=zeros(limits.max_sampled),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory a program runs in. The runner owns it.

    weights: uint8 [weights_nbytes], filled through `Backend.pack_weight` and the rope tables.
    arena: uint8 [arena_nbytes]. kv: uint8 [num_storages, num_blocks, page_nbytes].
    """

    weights: torch.Tensor
    arena: torch.Tensor
    kv: torch.Tensor


class WeightRows(StoredRows, Protocol):
    """One checkpoint tensor, as the loader hands it to a backend, which takes it in `pieces` of the format
    that its weight has.

    raw: uint8 [rows, nbytes of a row], in the layout of `type_name`; a vector is one row. row_order: output
    row i is raw row row_order[i]; None where the order is kept.
    """


class Backend(Protocol):
    """Runs sealed programs."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def table(self) -> KernelTable:
        """What it can run."""

    def pack_weight(self, weight: Weight, parts: list[WeightRows], out: torch.Tensor) -> None:
        """Write a parameter, stacked from its parts, into `out`, uint8 [table.weight_nbytes(weight)]."""

    def bind(self, sealed: SealedProgram, memory: DeviceMemory, inputs: StepInputs) -> None:
        """Prepare to run a program in this memory. Called once, after the weights are packed."""

    def run(self, num_tokens: int, num_seqs: int, num_sampled: int) -> torch.Tensor:
        """Run a step on what `inputs` holds; return logits f32 [num_sampled, vocab], a view that the
        next run overwrites. Raises BackendError(op, row, cause) for inputs out of range."""

    def close(self) -> None:
        """Stop threads. The backend is not used again."""


@runtime_checkable
class ChoosesTokens(Protocol):
    """What a backend may do besides: choose tokens from logits, which sampling/choice.py does otherwise."""

    def choose(
        self, logits: LogitsRows, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int]:
        """See sampling.choice.Choose. logits: contiguous rows of one width."""
