"""One row for each request in the batch, for as long as it stays there.

Rule: a row's place never changes, and every write says where it goes, so applying a diff twice changes
nothing. Sampled tokens are written here first; the next step reads them here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.messages import NewRow, RowStep
from octavo.program.planner import Limits
from octavo.sampling.sampler import SamplingRow

Int32Array = npt.NDArray[np.int32]


class RequestStates:
    """Arrays by row: token_ids [rows, max_model_len], block_table [groups, rows, max_blocks]."""

    def __init__(self, limits: Limits, num_groups: int) -> None:
        rows = limits.max_seqs
        self.token_ids = np.zeros((rows, limits.max_model_len), np.int32)
        self.block_table = np.zeros((num_groups, rows, limits.max_blocks), np.int32)
        self.num_prompt = np.zeros(rows, np.int32)
        self._sampling: list[SamplingRow | None] = [None] * rows
        self._rows: dict[str, int] = {}
        self._free = list(range(rows))[::-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.token_ids.nbytes + self.block_table.nbytes + self.num_prompt.nbytes

    def row(self, request_id: str) -> int:
        """A request's row."""
        return self._rows[request_id]

    def sampling(self, row: int) -> SamplingRow:
        """What sampling needs to know of a row."""
        sampling = self._sampling[row]
        assert sampling is not None, f"row {row} is free"
        return sampling

    def reset(self) -> None:
        """Free all rows."""
        for request_id in list(self._rows):
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Free a request's row, if it has one."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._sampling[row] = None
            self._free.append(row)

    def add(self, new: NewRow) -> None:
        """Give a request a row and write all that is known of it."""
        row = self._rows.get(new.request_id)
        if row is None:
            row = self._rows[new.request_id] = self._free.pop()
        prompt, total = len(new.prompt_ids), len(new.prompt_ids) + len(new.output_ids)
        self.token_ids[row, :prompt] = new.prompt_ids
        self.token_ids[row, prompt:total] = new.output_ids
        self.num_prompt[row] = prompt
        self._sampling[row] = SamplingRow(
            request_id=new.request_id,
            params=new.params,
            num_prompt=prompt,
            token_ids=self.token_ids[row],
            stop_ids=new.stop_ids,
        )

    def write_blocks(self, step: RowStep) -> None:
        """Apply a step's block-table diff."""
        row = self._rows[step.request_id]
        for group, (index, ids) in enumerate(step.block_writes):
            self.block_table[group, row, index : index + len(ids)] = ids

    def write_token(self, request_id: str, position: int, token_id: int) -> None:
        """Put a sampled token in its place, if the request is still here and the place exists."""
        row = self._rows.get(request_id)
        if row is not None and position < self.token_ids.shape[1]:
            self.token_ids[row, position] = token_id
