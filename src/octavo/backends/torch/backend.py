"""The reference backend: interprets a program op by op with torch on the CPU.

It is the oracle for every other backend and serves where no compiler was at hand. Rule: readable
first, row-invariant always; see linear.py, attention.py and elementwise.py for how.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from octavo.backends.base import DeviceMemory, StepInputs, WeightRows
from octavo.backends.torch.attention import Items, attention
from octavo.backends.torch.elementwise import gate, rms_norm, softcap
from octavo.backends.torch.linear import QuantizedWeight, linear
from octavo.backends.torch.moe import Affine, moe
from octavo.backends.torch.rotary import kv_views, rotary_store_kv
from octavo.backends.torch.table import TorchKernelTable
from octavo.errors import BackendError
from octavo.program.ir import (
    BLOCK_SIZE,
    KV,
    Add,
    AddRMSNorm,
    Attention,
    Buf,
    Embedding,
    GatedActivation,
    GatherRows,
    KVGroup,
    Linear,
    MoE,
    Op,
    QKNorm,
    RMSNorm,
    RotaryStoreKV,
    ScaleLogits,
    Weight,
)
from octavo.program.planner import SealedProgram
from octavo.quantization.conversion import pieces
from octavo.quantization.formats import NATIVE_TYPES, Format
from octavo.quantization.packing import Groups, unpack_groups

_DTYPES = {Format.F16: torch.float16, Format.BF16: torch.bfloat16}


class _Step:
    """The inputs of one step as tensors, and its items per layer group."""

    def __init__(
        self,
        inputs: StepInputs,
        groups: tuple[KVGroup, ...],
        num_tokens: int,
        num_seqs: int,
        num_sampled: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.token_ids = torch.from_numpy(inputs.token_ids[:num_tokens].astype(np.int64))
        self.positions = torch.from_numpy(inputs.positions[:num_tokens].astype(np.int64))
        self.rope_rows = torch.from_numpy(inputs.rope_rows[:num_tokens].astype(np.int64))
        self.slots = torch.from_numpy(inputs.slot_mapping[:, :num_tokens].astype(np.int64))
        self.sampled_rows = torch.from_numpy(inputs.sampled_rows[:num_sampled].astype(np.int64))
        self.sizes = {"T": num_tokens, "S": num_seqs, "R": num_sampled}
        self.items = [
            Items.build(
                inputs.cu_q[: num_seqs + 1],
                inputs.seq_lens[:num_seqs],
                table[:num_seqs],
                inputs.positions,
                group.window,
            )
            for group, table in zip(groups, inputs.block_table, strict=True)
        ]


class TorchBackend:
    """Runs programs on torch. quantized: compute in the arithmetic of quantised weights, as the native
    backend does; else dequantise them and compute in f32. num_threads is torch's, process-wide."""

    name = "torch"

    def __init__(self, *, quantized: bool = False, num_threads: int | None = None) -> None:
        self.table = TorchKernelTable(quantized=quantized)
        self._quantized = quantized
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    # -- loading ------------------------------------------------------------------------------

    def pack_weight(self, weight: Weight, parts: list[WeightRows], out: torch.Tensor) -> None:
        """Dequantise, or unpack to integers and scales, piece by piece."""
        quantized = weight.format.quantized
        target = _quantized_views(weight, out) if self._quantized and quantized else None
        dtype = _DTYPES.get(weight.format, torch.float32)
        values = out.view(dtype).view(weight.shape[0], -1) if target is None else None
        start = 0
        for piece in (piece for part in parts for piece in pieces(part, weight.format)):
            raw = piece.raw if piece.row_order is None else piece.raw[piece.row_order]
            if not quantized:
                stop = start + raw.size // (weight.format.element_nbytes * math.prod(weight.shape[1:]))
                assert values is not None
                into = values[start:stop].view(torch.uint8).numpy()
                np.copyto(into, raw.reshape(into.shape))
            else:
                groups = unpack_groups(NATIVE_TYPES[weight.format], raw)
                stop = start + groups.q.shape[0]
                if target is None:
                    assert values is not None
                    values[start:stop] = torch.from_numpy(groups.values())
                else:
                    _write_groups(target, groups, start, stop)
            start = stop

    def bind(self, sealed: SealedProgram, memory: DeviceMemory, inputs: StepInputs) -> None:
        """See Backend.bind."""
        self._sealed, self._memory, self._inputs = sealed, memory, inputs
        self._weights = {w.id: self._view(w) for w in sealed.program.weights}
        self._ropes = {}
        for rope in sealed.program.ropes:
            start = sealed.rope_offsets[rope.id]
            table = memory.weights[start : start + rope.nbytes].view(torch.float32)
            self._ropes[rope.id] = table.view(rope.num_rows, rope.rotary_dim)

    def _view(self, weight: Weight) -> torch.Tensor | QuantizedWeight:
        start = self._sealed.weight_offsets[weight.id]
        memory = self._memory.weights[start : start + self.table.weight_nbytes(weight)]
        if self._quantized and weight.format.quantized:
            return _quantized_views(weight, memory)
        return memory.view(_DTYPES.get(weight.format, torch.float32)).view(weight.shape)

    # -- running ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, num_tokens: int, num_seqs: int, num_sampled: int) -> torch.Tensor:
        """See Backend.run."""
        self._check_inputs(num_tokens, num_seqs, num_sampled)
        step = _Step(self._inputs, self._sealed.program.kv_groups, num_tokens, num_seqs, num_sampled)
        for planned in self._sealed.ops:
            self._HANDLERS[type(planned.op)](self, planned.op, step)
        return self._buf(self._sealed.program.logits, step)

    def close(self) -> None:
        """Nothing to stop."""

    def _check_inputs(self, num_tokens: int, num_seqs: int, num_sampled: int) -> None:
        """Raise BackendError for what would read or write out of range, before anything is written."""
        program, inputs, limits = self._sealed.program, self._inputs, self._sealed.limits
        for name, size, least, most in (
            ("tokens", num_tokens, 1, limits.max_tokens),
            ("sequences", num_seqs, 1, limits.max_seqs),
            ("sampled rows", num_sampled, 0, limits.max_sampled),
        ):
            if not least <= size <= most:
                raise BackendError(f"the step has {size} {name}, but {least} to {most} fit")
        num_blocks = self._memory.kv.shape[1]
        positions = min((rope.max_positions for rope in program.ropes), default=2**31)
        rope_rows = min((rope.num_rows for rope in program.ropes), default=2**31)
        vocab = next(op.weight.shape[0] for op in program.ops if isinstance(op, Embedding))
        for name, values, stop in (
            ("token_ids", inputs.token_ids[:num_tokens], vocab),
            ("positions", inputs.positions[:num_tokens], positions),
            ("rope_rows", inputs.rope_rows[:num_tokens], rope_rows),
            ("slot_mapping", inputs.slot_mapping[:, :num_tokens], num_blocks * BLOCK_SIZE),
            ("sampled_rows", inputs.sampled_rows[:num_sampled], num_tokens),
            ("seq_lens", inputs.seq_lens[:num_seqs], limits.max_model_len + 1),
        ):
            if values.size and (values.min() < 0 or values.max() >= stop):
                raise BackendError(
                    f"step inputs: {name} must lie in 0..{stop - 1}, found {values.min()}..{values.max()}"
                )
        cu_q = inputs.cu_q[: num_seqs + 1]
        if cu_q[0] != 0 or cu_q[-1] != num_tokens or (np.diff(cu_q) < 0).any():
            raise BackendError(f"step inputs: cu_q must rise from 0 to {num_tokens}, found {cu_q.tolist()}")
        for s in range(num_seqs):
            self._check_sequence(s, int(cu_q[s]), int(cu_q[s + 1]))

    def _check_sequence(self, s: int, begin: int, end: int) -> None:
        """The new tokens of sequence `s` are its last, and the blocks they see exist."""
        inputs, length = self._inputs, int(self._inputs.seq_lens[s])
        if begin == end:
            return
        expected = np.arange(length - (end - begin), length)
        if not np.array_equal(inputs.positions[begin:end], expected):
            raise BackendError(
                f"step inputs: the {end - begin} new tokens of sequence {s} must end at its length, "
                f"{length}; found positions {inputs.positions[begin]}..{inputs.positions[end - 1]}"
            )
        for group, table in zip(self._sealed.program.kv_groups, inputs.block_table, strict=True):
            first = 0 if group.window is None else max(0, int(expected[0]) - group.window + 1)
            blocks = table[s, first // BLOCK_SIZE : -(-length // BLOCK_SIZE)]
            num_blocks = self._memory.kv.shape[1]
            if blocks.min() < 0 or blocks.max() >= num_blocks:
                raise BackendError(
                    f"step inputs: block_table of sequence {s} must lie in 0..{num_blocks - 1}, found "
                    f"{blocks.min()}..{blocks.max()}"
                )

    def _buf(self, buf: Buf, step: _Step) -> torch.Tensor:
        """The rows of a buffer that this step uses."""
        rows = step.sizes[buf.rows]
        start = self._sealed.offset(buf)
        memory = self._memory.arena[start : start + rows * buf.width * 4]
        return memory.view(torch.float32).view(rows, buf.width)

    def _dense(self, weight: Weight) -> torch.Tensor:
        tensor = self._weights[weight.id]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _caches(self, kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_views(self._memory.kv[self._sealed.program.kv_places[kv.layer][1]], kv)

    # -- ops: each handler reads its op's inputs and writes its outputs ------------------------

    def _embedding(self, op: Embedding, step: _Step) -> None:
        weight = self._weights[op.weight.id]
        if isinstance(weight, QuantizedWeight):
            rows = weight.q[step.token_ids].float().view(step.num_tokens, weight.d.shape[1], -1)
            rows = rows * weight.d[step.token_ids][:, :, None]
            if weight.m is not None:
                rows = rows + weight.m[step.token_ids][:, :, None]
            rows = rows.view(step.num_tokens, -1)
        else:
            rows = weight[step.token_ids].float()
        self._buf(op.out, step).copy_(rows if op.scale == 1.0 else rows * op.scale)

    def _rms_norm(self, op: RMSNorm, step: _Step) -> None:
        x = self._buf(op.x, step)
        self._buf(op.out, step).copy_(rms_norm(x, self._dense(op.weight), op.eps))

    def _sum(self, op: Add | AddRMSNorm, step: _Step) -> torch.Tensor:
        x = self._buf(op.x, step)
        return self._buf(op.residual, step) + (x if op.x_scale is None else x * op.x_scale)

    def _add(self, op: Add, step: _Step) -> None:
        self._buf(op.out, step).copy_(self._sum(op, step))

    def _add_rms_norm(self, op: AddRMSNorm, step: _Step) -> None:
        total = self._sum(op, step)
        self._buf(op.out_sum, step).copy_(total)
        self._buf(op.out, step).copy_(rms_norm(total, self._dense(op.weight), op.eps))

    def _linear(self, op: Linear, step: _Step) -> None:
        out = self._buf(op.out, step)
        linear(self._buf(op.x, step), self._weights[op.weight.id], out, op.activation_top)
        if op.bias is not None:
            out += self._dense(op.bias)

    def _qk_norm(self, op: QKNorm, step: _Step) -> None:
        qkv, out = self._buf(op.qkv, step), self._buf(op.out, step)
        out.copy_(qkv)
        start = 0
        for heads, weight in ((op.q_heads, op.q_weight), (op.kv_heads, op.k_weight)):
            stop = start + heads * op.head_dim
            rows = qkv[:, start:stop].reshape(-1, weight.shape[0])
            out[:, start:stop] = rms_norm(rows, self._dense(weight), op.eps).view(-1, stop - start)
            start = stop

    def _scale_logits(self, op: ScaleLogits, step: _Step) -> None:
        logits = self._buf(op.x, step) * op.scale
        self._buf(op.out, step).copy_(logits if op.softcap is None else softcap(logits, op.softcap))

    def _rotary_store_kv(self, op: RotaryStoreKV, step: _Step) -> None:
        group, _ = self._sealed.program.kv_places[op.kv.layer]
        cos_sin = self._ropes[op.rope.id][step.rope_rows]
        qkv = self._buf(op.qkv, step)
        q = rotary_store_kv(qkv, cos_sin, step.slots[group], self._caches(op.kv), op.q_heads)
        self._buf(op.out, step).copy_(q)

    def _attention(self, op: Attention, step: _Step) -> None:
        group, _ = self._sealed.program.kv_places[op.kv.layer]
        q = self._buf(op.q, step)
        sinks = None if op.sinks is None else self._dense(op.sinks)
        out = attention(q, *self._caches(op.kv), step.items[group], op.kv, op.scale, op.softcap, sinks)
        self._buf(op.out, step).copy_(out)

    def _gated_activation(self, op: GatedActivation, step: _Step) -> None:
        self._buf(op.out, step).copy_(gate(self._buf(op.x, step), op.activation))

    def _moe(self, op: MoE, step: _Step) -> None:
        router = self._affine(op.router, op.router_bias)
        gate_up, down = self._affine(op.gate_up, op.gate_up_bias), self._affine(op.down, op.down_bias)
        self._buf(op.out, step).copy_(moe(self._buf(op.x, step), router, gate_up, down, op))

    def _affine(self, weight: Weight, bias: Weight | None) -> Affine:
        return Affine(self._dense(weight), None if bias is None else self._dense(bias))

    def _gather_rows(self, op: GatherRows, step: _Step) -> None:
        self._buf(op.out, step).copy_(self._buf(op.x, step)[step.sampled_rows])

    _HANDLERS: dict[type[Op], Callable[..., None]] = {  # noqa: RUF012
        Embedding: _embedding,
        RMSNorm: _rms_norm,
        Add: _add,
        QKNorm: _qk_norm,
        ScaleLogits: _scale_logits,
        AddRMSNorm: _add_rms_norm,
        Linear: _linear,
        RotaryStoreKV: _rotary_store_kv,
        Attention: _attention,
        GatedActivation: _gated_activation,
        MoE: _moe,
        GatherRows: _gather_rows,
    }


def _write_groups(target: QuantizedWeight, groups: Groups, start: int, stop: int) -> None:
    target.q[start:stop] = torch.from_numpy(groups.q)
    target.d[start:stop] = torch.from_numpy(groups.d)
    if target.m is not None:
        assert groups.m is not None
        target.m[start:stop] = torch.from_numpy(groups.m)


def _quantized_views(weight: Weight, memory: torch.Tensor) -> QuantizedWeight:
    """[q int8 | d f32 | m f32 if any] in one piece of memory."""
    n, k = weight.shape
    q = memory[: n * k].view(torch.int8).view(n, k)
    scales = memory[n * k :].view(torch.float32)
    if weight.format is not Format.Q4M:
        return QuantizedWeight(weight.format, q, scales.view(n, -1), None)
    d, m = scales.view(2, n, -1)
    return QuantizedWeight(weight.format, q, d, m)
