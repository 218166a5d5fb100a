"""Programs of one op, many times, for benchmarks: each time with a weight of its own.

Rule: whoever asks for enough copies gets weights that no cache holds, as a model's are. What is timed is the
whole step, whose other ops are an embedding and a gather of few bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.base import DeviceMemory, StepInputs
from octavo.backends.native.backend import NativeBackend
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import BLOCK_SIZE, Buf, DType
from octavo.program.planner import Limits, seal
from octavo.quantization.formats import NATIVE_TYPES, Format
from octavo.quantization.quantize import requantize
from octavo.runner.cpu_model_runner import huge_pages

_DISTINCT = 64  # rows of a weight that are drawn; the others repeat them

#: Applies the op for the i-th time to x.
Emit = Callable[[ProgramBuilder, Buf, int], Buf]


@dataclass(frozen=True)
class Rows:
    """A tensor as a file would store it (octavo.backends.base.WeightRows)."""

    type_name: str
    raw: npt.NDArray[np.uint8]
    row_order = None

    def release(self) -> None:
        """There is no file."""


class OpBench:
    """One program, ready to run on 1 to `max_rows` rows.

    columns: of the op's input. sampled: the rows are those whose logits are wanted, as the head's are.
    """

    def __init__(
        self,
        backend: NativeBackend,
        columns: int,
        copies: int,
        emit: Emit,
        *,
        format_: Format = Format.F32,
        activation_bits: int = 16,
        max_rows: int = 512,
        sampled: bool = False,
    ) -> None:
        builder = ProgramBuilder(
            "ops",
            format_of=lambda parts: Format.F32 if parts == ("x",) else format_,
            kv_dtype=DType.F16,
            activation_bits=activation_bits,
        )
        builder.kv(1, 8)  # a program keeps a cache; this one does not use it
        x = builder.embedding(builder.weight("x", (max_rows, columns)))
        if sampled:
            x = builder.gather_sampled(x)
        for i in range(copies):
            emit(builder, x, i)
        self.program = builder.build(x if sampled else builder.gather_sampled(x))
        self.copies, self.max_rows = copies, max_rows
        self._sampled = sampled
        self._backend = backend
        self.sealed = sealed = seal(self.program, Limits(max_rows, 1, max_rows, max_rows), backend.table)
        num_blocks = -(-max_rows // BLOCK_SIZE)
        memory = DeviceMemory(
            weights=huge_pages(sealed.weights_nbytes),
            arena=huge_pages(sealed.arena_nbytes),
            kv=huge_pages(1, num_blocks, self.program.page_nbytes),
        )
        packed: dict[tuple[tuple[int, ...], Format], torch.Tensor] = {}
        for weight in self.program.weights:
            begin = sealed.weight_offsets[weight.id]
            out = memory.weights[begin : begin + backend.table.weight_nbytes(weight)]
            same = packed.get((weight.shape, weight.format))
            if same is None:
                backend.pack_weight(weight, [_random(weight.shape, weight.format)], out)
                packed[weight.shape, weight.format] = out
            else:
                out.copy_(same)
        self._inputs = StepInputs.allocate(sealed.limits, 1)
        self._inputs.token_ids[:] = self._inputs.positions[:] = np.arange(max_rows)
        self._inputs.sampled_rows[:] = np.arange(max_rows)
        self._inputs.slot_mapping[0] = np.arange(max_rows)
        self._inputs.block_table[0, 0] = np.arange(num_blocks)
        backend.bind(sealed, memory, self._inputs)

    @property
    def kernel(self) -> str:
        """What runs the op."""
        return self.sealed.ops[-1 if self._sampled else -2].kernel.name

    @property
    def weight_nbytes(self) -> int:
        """Bytes of one copy's weights as they lie in memory."""
        weights = [weight for weight in self.program.weights if weight.name != "x"]
        return sum(map(self._backend.table.weight_nbytes, weights)) // self.copies

    def run(self, rows: int) -> float:
        """Seconds of one time of the op on that many rows."""
        self._inputs.cu_q[1] = self._inputs.seq_lens[0] = rows
        started = time.perf_counter()
        self._backend.run(rows, 1, rows if self._sampled else 1)
        return (time.perf_counter() - started) / self.copies


def _random(shape: tuple[int, ...], format_: Format) -> Rows:
    name = NATIVE_TYPES[format_]
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    values = np.random.default_rng(0).normal(size=(min(rows, _DISTINCT), columns)).astype(np.float32)
    if format_ is Format.Q8G16:  # no file has it
        raw = requantize(values, format_)
    else:
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    return Rows(name, np.resize(raw, (rows, raw.shape[1])))
