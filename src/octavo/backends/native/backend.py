"""The native backend: a sealed program becomes an array of op descriptors, a step one C call.

Rule: Python touches a step twice, before it (the runner fills the inputs) and after it (a view of
the logits). Errors of the library become BackendError here and nowhere else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from octavo.backends.base import DeviceMemory, LogitsRows, StepInputs, WeightRows
from octavo.backends.native import library
from octavo.backends.native.choosing import Chooser
from octavo.backends.native.library import (
    ActivationCode,
    DTypeCode,
    ExpertsDesc,
    FormatCode,
    Isa,
    OpCode,
    OpDesc,
    RowsCode,
)
from octavo.backends.native.quantizer import quantize_with
from octavo.backends.native.table import NativeKernelTable
from octavo.errors import BackendError, ConfigError
from octavo.program.ir import (
    ACTIVATIONS,
    KV,
    Add,
    AddRMSNorm,
    Attention,
    Buf,
    Dim,
    DType,
    Embedding,
    GatedActivation,
    GatherRows,
    Linear,
    MoE,
    Op,
    QKNorm,
    RMSNorm,
    RotaryStoreKV,
    ScaleLogits,
    Weight,
)
from octavo.program.planner import ALIGNMENT, PlannedOp, SealedProgram
from octavo.quantization.conversion import pieces
from octavo.quantization.formats import Format
from octavo.quantization.quantize import Bytes, Floats
from octavo.sampling_params import SamplingParams

_FORMATS = {format_: FormatCode[format_.name] for format_ in Format}
_DTYPES = {dtype: DTypeCode[dtype.name] for dtype in DType}
_ACTIVATIONS = {name: ActivationCode[name.upper()] for name in ACTIVATIONS}
_ROWS = {Dim.TOKENS: RowsCode.TOKENS, Dim.SEQS: RowsCode.SEQS, Dim.SAMPLED: RowsCode.SAMPLED}


class NativeBackend:
    """Runs programs on the CPU with `num_threads` threads, the caller of `run` being one of them.

    isa: "auto" (the fastest this CPU runs) or the name of an `Isa`; all give the same bits.
    Raises ConfigError if the library is missing or this CPU lacks the ISA.
    """

    name = "native"

    def __init__(self, num_threads: int, isa: str = "auto") -> None:
        if num_threads < 1:
            raise ConfigError(f"the native backend needs at least 1 thread, not {num_threads}")
        try:
            code = Isa[isa.upper()]
        except KeyError:
            known = ", ".join(i.name.lower() for i in Isa)
            raise ConfigError(f"there is no ISA {isa!r}; known: {known}") from None
        self.table = NativeKernelTable(num_threads)
        self._library = library.load()
        self._context: int | None = self._library.octavo_create(code, num_threads)
        if not self._context:
            raise ConfigError(
                f"the native backend did not start: this CPU does not run {isa!r} kernels, "
                f"or {num_threads} threads could not be started"
            )
        self._status = library.Status()
        self._run = self._library.octavo_run
        self._bound: _Bound | None = None
        self._chooser = Chooser(self._library)

    @property
    def isa(self) -> str:
        """Which kernels run: the name of an `Isa`, in small letters."""
        return str(self._library.octavo_isa(self._require_context()).decode())

    def pack_weight(self, weight: Weight, parts: list[WeightRows], out: torch.Tensor) -> None:
        """Write a parameter, stacked from its parts, into `out`, uint8 [table.weight_nbytes(weight)]."""
        context = self._require_context()
        out.zero_()
        if len(weight.shape) == 1:
            raws = [piece.raw.reshape(-1) for part in parts for piece in pieces(part, Format.F32)]
            values = np.concatenate(raws).view(np.float32)
            _expect_rows(weight, len(values))
            out[: values.nbytes].view(torch.float32).copy_(torch.from_numpy(values))
            return
        first_row = 0
        for piece in (piece for part in parts for piece in pieces(part, weight.format, self._quantize)):
            raw, row_order = np.ascontiguousarray(piece.raw), piece.row_order
            num_rows = len(raw) if row_order is None else len(row_order)
            if first_row + num_rows <= weight.shape[0]:
                job = library.PackJob(
                    format=_FORMATS[weight.format],
                    width=weight.shape[1],
                    num_rows=num_rows,
                    first_row=first_row,
                    raw=raw.ctypes.data,
                    row_order=None if row_order is None else row_order.ctypes.data,
                    packed=_address(out),
                )
                self._library.octavo_pack(context, ctypes.byref(job))
            first_row += num_rows
        _expect_rows(weight, first_row)

    def _quantize(self, values: Floats, format_: Format) -> Bytes:
        return quantize_with(self._library, self._require_context(), values, format_)

    def bind(self, sealed: SealedProgram, memory: DeviceMemory, inputs: StepInputs) -> None:
        """Prepare to run a program in this memory. Called once, after the weights are packed."""
        context = self._require_context()
        writer = _OpWriter(sealed, memory)
        ops = (OpDesc * len(sealed.ops))(*map(writer.write, sealed.ops))
        limits = library.LimitsDesc(
            max_tokens=sealed.limits.max_tokens,
            max_seqs=sealed.limits.max_seqs,
            max_sampled=sealed.limits.max_sampled,
            max_blocks=sealed.limits.max_blocks,
            num_groups=len(sealed.program.kv_groups),
            num_blocks=memory.kv.shape[1],
        )
        names = (field[0] for field in library.Inputs._fields_)
        arrays = library.Inputs(**{name: getattr(inputs, name).ctypes.data for name in names})
        self._bound = None
        self._library.octavo_bind(
            context, ops, len(ops), ctypes.byref(arrays), ctypes.byref(limits), ctypes.byref(self._status)
        )
        self._bound = _Bound(sealed, memory, inputs, writer.experts)
        self._check_status()

    def run(self, num_tokens: int, num_seqs: int, num_sampled: int) -> torch.Tensor:
        """Run a step on what `inputs` holds; return logits f32 [num_sampled, vocab], a view that the
        next run overwrites. Raises BackendError(op, row, cause) for inputs out of range, and has then
        written nothing."""
        self._run(self._require_context(), num_tokens, num_seqs, num_sampled, ctypes.byref(self._status))
        self._check_status()
        assert self._bound is not None  # or the library had refused
        return self._bound.logits[:num_sampled]

    def choose(
        self, logits: LogitsRows, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[int]:
        """See base.ChoosesTokens."""
        return self._chooser.choose(self._require_context(), logits, params, positions)

    def close(self) -> None:
        """Stop threads. The backend is not used again."""
        if self._context:
            self._library.octavo_destroy(self._context)
        self._context = None
        self._bound = None

    def _require_context(self) -> int:
        if not self._context:
            raise BackendError("the native backend was used after close()")
        return self._context

    def _check_status(self) -> None:
        status = self._status
        if not status.code:
            return
        where = []
        if status.op >= 0:
            kind = "" if self._bound is None else f" ({self._bound.kinds[status.op]})"
            where.append(f"op {status.op}{kind}")
        if status.row >= 0:
            where.append(f"row {status.row}")
        cause = status.cause.decode(errors="replace")
        raise BackendError(f"native backend: {', '.join([*where, cause])}")


class _Bound:
    """What a bound program needs kept alive, and its logits at the limits."""

    def __init__(
        self,
        sealed: SealedProgram,
        memory: DeviceMemory,
        inputs: StepInputs,
        experts: list[ExpertsDesc],
    ) -> None:
        program, limits = sealed.program, sealed.limits
        begin = sealed.offset(program.logits)
        nbytes = limits.of(program.logits.rows) * program.vocab_size * 4
        flat = memory.arena[begin : begin + nbytes].view(torch.float32)
        self.logits = flat.view(-1, program.vocab_size)
        self.kinds = [op.kind for op in program.ops]
        self._keep = (memory, inputs, experts)


class _OpWriter:
    """Turns planned ops into descriptors: symbolic handles become addresses."""

    def __init__(self, sealed: SealedProgram, memory: DeviceMemory) -> None:
        self._sealed = sealed
        self._weights = _address(memory.weights)
        self._arena = _address(memory.arena)
        self._kv = _address(memory.kv)
        self._storage_nbytes = memory.kv[0].numel()
        self.experts: list[ExpertsDesc] = []  # the descriptors point at them
        self._by_type: dict[type[Op], Callable[[OpDesc, Any], None]] = {
            Embedding: self._embedding,
            RMSNorm: self._norm,
            Add: self._add,
            AddRMSNorm: self._add_norm,
            QKNorm: self._qk_norm,
            Linear: self._linear,
            RotaryStoreKV: self._rotary,
            Attention: self._attention,
            GatedActivation: self._gated,
            MoE: self._moe,
            GatherRows: self._gather,
            ScaleLogits: self._scale_logits,
        }

    def write(self, planned: PlannedOp) -> OpDesc:
        """The descriptor of an op."""
        op = planned.op
        desc = OpDesc(
            rows=_ROWS[op.out.rows],
            out=self._buf(op.out),
            out_width=op.out.width,
            scratch=self._arena + planned.scratch,
            scratch_nbytes=planned.kernel.scratch_nbytes,
        )
        self._by_type[type(op)](desc, op)
        return desc

    def _embedding(self, desc: OpDesc, op: Embedding) -> None:
        desc.kind = OpCode.EMBEDDING
        desc.format = _FORMATS[op.weight.format]
        desc.weight = self._weight(op.weight)
        desc.table_rows = op.weight.shape[0]
        desc.scale = op.scale

    def _norm(self, desc: OpDesc, op: RMSNorm) -> None:
        desc.kind = OpCode.RMS_NORM
        self._read(desc, op.x)
        desc.weight = self._weight(op.weight)
        desc.eps = op.eps

    def _add(self, desc: OpDesc, op: Add) -> None:
        desc.kind = OpCode.ADD
        self._sum(desc, op)

    def _add_norm(self, desc: OpDesc, op: AddRMSNorm) -> None:
        desc.kind = OpCode.ADD_RMS_NORM
        self._sum(desc, op)
        desc.out_sum = self._buf(op.out_sum)
        desc.weight = self._weight(op.weight)
        desc.eps = op.eps

    def _qk_norm(self, desc: OpDesc, op: QKNorm) -> None:
        desc.kind = OpCode.QK_NORM
        self._read(desc, op.qkv)
        desc.weight = self._weight(op.q_weight)
        desc.k_weight = self._weight(op.k_weight)
        desc.eps = op.eps
        desc.q_heads = op.q_heads
        desc.kv_heads = op.kv_heads
        desc.head_dim = op.head_dim
        desc.norm_together = op.together

    def _linear(self, desc: OpDesc, op: Linear) -> None:
        desc.kind = OpCode.LINEAR
        desc.activation_bits = op.activation_bits or 0
        self._read(desc, op.x)
        desc.format = _FORMATS[op.weight.format]
        desc.weight = self._weight(op.weight)
        desc.bias = self._optional(op.bias)

    def _rotary(self, desc: OpDesc, op: RotaryStoreKV) -> None:
        desc.kind = OpCode.ROTARY_STORE_KV
        self._read(desc, op.qkv)
        self._cache(desc, op.kv, op.q_heads)
        desc.weight = self._weights + self._sealed.rope_offsets[op.rope.id]
        desc.table_rows = op.rope.num_rows
        desc.rotary_dim = op.rope.rotary_dim

    def _attention(self, desc: OpDesc, op: Attention) -> None:
        desc.kind = OpCode.ATTENTION
        self._read(desc, op.q)
        self._cache(desc, op.kv, op.q_heads)
        desc.window = op.kv.window or 0
        desc.scale = op.scale
        desc.softcap = op.softcap or 0.0
        desc.sinks = self._optional(op.sinks)

    def _gated(self, desc: OpDesc, op: GatedActivation) -> None:
        desc.kind = OpCode.GATED_ACTIVATION
        desc.activation = _ACTIVATIONS[op.activation]
        self._read(desc, op.x)

    def _moe(self, desc: OpDesc, op: MoE) -> None:
        desc.kind = OpCode.MOE
        desc.activation = _ACTIVATIONS[op.activation]
        desc.activation_bits = op.activation_bits or 0
        self._read(desc, op.x)
        experts = ExpertsDesc(
            num_experts=op.num_experts,
            top_k=op.top_k,
            normalize=op.normalize,
            width=op.down.shape[1],
            router_format=_FORMATS[op.router.format],
            gate_up_format=_FORMATS[op.gate_up.format],
            down_format=_FORMATS[op.down.format],
            router=self._weight(op.router),
            gate_up=self._weight(op.gate_up),
            down=self._weight(op.down),
            router_bias=self._optional(op.router_bias),
            gate_up_bias=self._optional(op.gate_up_bias),
            down_bias=self._optional(op.down_bias),
        )
        self.experts.append(experts)
        desc.experts = ctypes.pointer(experts)

    def _gather(self, desc: OpDesc, op: GatherRows) -> None:
        desc.kind = OpCode.GATHER_ROWS
        self._read(desc, op.x)

    def _scale_logits(self, desc: OpDesc, op: ScaleLogits) -> None:
        desc.kind = OpCode.SCALE_LOGITS
        self._read(desc, op.x)
        desc.scale = op.scale
        desc.softcap = op.softcap or 0.0

    def _sum(self, desc: OpDesc, op: Add | AddRMSNorm) -> None:
        self._read(desc, op.x)
        desc.residual = self._buf(op.residual)
        desc.scale = 1.0 if op.x_scale is None else op.x_scale

    def _read(self, desc: OpDesc, x: Buf) -> None:
        desc.x = self._buf(x)
        desc.in_width = x.width

    def _cache(self, desc: OpDesc, kv: KV, q_heads: int) -> None:
        group, storage = self._sealed.program.kv_places[kv.layer]
        desc.kv = self._kv + storage * self._storage_nbytes
        desc.kv_group = group
        desc.kv_dtype = _DTYPES[kv.dtype]
        desc.q_heads = q_heads
        desc.kv_heads = kv.kv_heads
        desc.head_dim = kv.head_dim

    def _buf(self, buf: Buf) -> int:
        return self._arena + self._sealed.offset(buf)

    def _weight(self, weight: Weight) -> int:
        return self._weights + self._sealed.weight_offsets[weight.id]

    def _optional(self, weight: Weight | None) -> int | None:
        return None if weight is None else self._weight(weight)


def _expect_rows(weight: Weight, found: int) -> None:
    if found != weight.shape[0]:
        raise ConfigError(f"weight {weight.name!r} has {weight.shape[0]} rows, but its parts have {found}")


def _address(tensor: torch.Tensor) -> int:
    """The address of memory that kernels read with aligned loads."""
    address = tensor.data_ptr()
    if not tensor.is_contiguous() or address % ALIGNMENT:
        raise BackendError(
            f"memory for the native backend must be contiguous and aligned to {ALIGNMENT} bytes; "
            f"got a tensor {tuple(tensor.shape)} at {address:#x}"
        )
    return address
