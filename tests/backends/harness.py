"""A program, its memory and its sequences on any backend: what backend tests share.

Rule: nothing here knows which backend runs. KV pages start as NaN, block tables are shuffled and
their unused entries name no block, so that whatever a backend reads without right shows.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.base import Backend, DeviceMemory, Int32Array, StepInputs
from octavo.backends.native import library
from octavo.backends.native.library import Isa
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import BLOCK_SIZE, Buf, DType, Program, RopeTable
from octavo.program.planner import Limits, SealedProgram, seal
from octavo.quantization.formats import Format

F32Array = npt.NDArray[np.float32]

GGUF_TYPES = {
    Format.F32: gguf.GGMLQuantizationType.F32,
    Format.Q4: gguf.GGMLQuantizationType.Q4_0,
    Format.Q4M: gguf.GGMLQuantizationType.Q4_1,
    Format.Q8: gguf.GGMLQuantizationType.Q8_0,
    Format.F16: gguf.GGMLQuantizationType.F16,
    Format.BF16: gguf.GGMLQuantizationType.BF16,
}
OWN_TYPE = "Q8G16"  # what q8g16 is packed from, and no file has
TORCH_DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
UNIT = 2.0**-24  # the largest relative error of one rounding to f32

_libm = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
_libm.fmaf.restype = ctypes.c_float
_libm.fmaf.argtypes = [ctypes.c_float] * 3
_fmaf = np.frompyfunc(_libm.fmaf, 3, 1)


def _native_isas() -> list[str]:
    """The builds of the native kernels that this CPU runs, the scalar one first."""
    names: list[str] = []
    for isa in Isa:
        if isa is Isa.AUTO or not library.available():
            continue
        context = library.load().octavo_create(isa, 1)
        if context:
            names.append(isa.name.lower())
            library.load().octavo_destroy(context)
    return names


NATIVE_ISAS = _native_isas()
#: Builds of the kernels, each alone and with a second thread.
NATIVE_VARIANTS = [(isa, threads) for isa in NATIVE_ISAS for threads in (1, 2)]


def fma(a: F32Array, b: F32Array, c: F32Array) -> F32Array:
    """a * b + c in f32, rounded once, elementwise."""
    return np.asarray(_fmaf(a, b, c)).astype(np.float32)


@dataclass(frozen=True)
class Rows:
    """A checkpoint tensor as GGUF stores it (octavo.backends.base.WeightRows)."""

    type_name: str
    raw: npt.NDArray[np.uint8]
    row_order: Int32Array | None = None

    def release(self) -> None:
        """There is no file to let go of."""

    def dequantize(self) -> F32Array:
        """f32 [rows, K], rows in output order."""
        if self.type_name == OWN_TYPE:
            blocks = self.raw.reshape(len(self.raw), -1, 36)
            halves = blocks[:, :, 4:].copy().view(np.int8).reshape(*blocks.shape[:2], 2, 16)
            values = halves * blocks[:, :, :4].copy().view(np.float16).astype(np.float32)[..., None]
            values = values.reshape(len(self.raw), -1)
        else:
            values = gguf.quants.dequantize(self.raw, gguf.GGMLQuantizationType[self.type_name])
        values = np.asarray(values, np.float32)
        return values if self.row_order is None else values[self.row_order]


def stored(values: F32Array, format_: Format = Format.F32, row_order: Int32Array | None = None) -> Rows:
    """Values [rows, K] quantised to the type that the format holds without loss."""
    if values.ndim == 1:
        values = values[:, None]
    if format_ is Format.Q8G16:
        return Rows(OWN_TYPE, _halves_of_8_bits(values), row_order)
    kind = GGUF_TYPES[format_]
    raw = np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(values), kind))
    return Rows(kind.name, raw.view(np.uint8).reshape(len(values), -1), row_order)


def _halves_of_8_bits(values: F32Array) -> npt.NDArray[np.uint8]:
    """Two f16 scales, then 32 int8, for each 32 values."""
    parts = values.reshape(len(values), -1, 2, 16)
    scales = (np.abs(parts).max(axis=3) / 127).astype(np.float16)
    quants = np.rint(parts / np.maximum(scales.astype(np.float32), 1e-30)[..., None])
    integers = np.clip(quants, -128, 127).astype(np.int8).reshape(*parts.shape[:2], 32)
    blocks = np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], axis=2)
    return blocks.reshape(len(values), -1)


@dataclass
class Seq:
    """A sequence: its tokens, how many are computed, and its blocks in each KV group."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Rig:
    """One program, bound to its own memory on one backend.

    build: emits the program, returns its logits. weights: parts by weight name; a weight that is not
    named gets random values, from `seed` and its name alone. formats: by weight name, f32 if absent.
    """

    def __init__(
        self,
        backend: Backend,
        build: Callable[[ProgramBuilder], Buf],
        *,
        weights: Mapping[str, Rows | list[Rows]] | None = None,
        formats: Mapping[str, Format] | None = None,
        kv_dtype: DType = DType.F32,
        activation_bits: int = 16,
        limits: Limits | None = None,
        num_blocks: int = 64,
        seed: int = 0,
    ) -> None:
        formats = formats or {}
        builder = ProgramBuilder(
            "test",
            format_of=lambda parts: formats.get(parts[0], Format.F32),
            kv_dtype=kv_dtype,
            activation_bits=activation_bits,
            feed_forward_bits=activation_bits,
        )
        self.program: Program = builder.build(build(builder))
        self.limits = limits or Limits(max_tokens=96, max_seqs=8, max_sampled=96, max_model_len=256)
        self.backend = backend
        self.sealed = self._lay_out(seal(self.program, self.limits, backend.table))
        self.inputs = StepInputs.allocate(self.limits, len(self.program.kv_groups))
        self.memory = self._allocate(num_blocks)
        self.parts: dict[str, list[Rows]] = {}
        self._pack(weights or {}, seed)
        backend.bind(self.sealed, self.memory, self.inputs)
        # One pool for all groups, in random order; the last block is never used: a fence of NaN.
        self._free = [int(i) for i in np.random.default_rng(seed).permutation(num_blocks - 1)]

    # -- weights ------------------------------------------------------------------------------

    def value(self, name: str) -> F32Array:
        """A weight as f32, dequantised, parts stacked."""
        return np.concatenate([part.dequantize() for part in self.parts[name]])

    def _pack(self, given: Mapping[str, Rows | list[Rows]], seed: int) -> None:
        for weight in self.program.weights:
            if weight.name in given:
                parts = given[weight.name]
                self.parts[weight.name] = parts if isinstance(parts, list) else [parts]
            else:
                self.parts[weight.name] = [
                    stored(random_values(weight.name, weight.shape, seed), weight.format)
                ]
            begin = self.sealed.weight_offsets[weight.id]
            nbytes = self.backend.table.weight_nbytes(weight)
            out = self.memory.weights[begin : begin + nbytes]
            self.backend.pack_weight(weight, list(self.parts[weight.name]), out)
        for rope in self.program.ropes:
            begin = self.sealed.rope_offsets[rope.id]
            table = torch.from_numpy(rope_values(rope)).reshape(-1)
            self.memory.weights[begin : begin + rope.nbytes].view(torch.float32).copy_(table)

    def _lay_out(self, sealed: SealedProgram) -> SealedProgram:
        return sealed

    def _allocate(self, num_blocks: int) -> DeviceMemory:
        def all_ones(*shape: int) -> torch.Tensor:  # NaN as f32 and as f16
            return torch.full(shape, 0xFF, dtype=torch.uint8)

        return DeviceMemory(
            weights=all_ones(self.sealed.weights_nbytes),
            arena=all_ones(self.sealed.arena_nbytes),
            kv=all_ones(self.program.num_storages, num_blocks, self.program.page_nbytes),
        )

    # -- KV -----------------------------------------------------------------------------------

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a layer's K [blocks, kv_heads, head_dim, 16] and V [blocks, kv_heads, 16, head_dim]."""
        kv = self.program.kv_layers[layer]
        _, storage = self.program.kv_places[layer]
        pages = (
            self.memory.kv[storage]
            .view(TORCH_DTYPES[kv.dtype])
            .view(-1, 2, kv.kv_heads, kv.head_dim * BLOCK_SIZE)
        )
        k = pages[:, 0].view(-1, kv.kv_heads, kv.head_dim, BLOCK_SIZE)
        v = pages[:, 1].view(-1, kv.kv_heads, BLOCK_SIZE, kv.head_dim)
        return k, v

    def stored_kv(self, seq: Seq, layer: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """K and V of a sequence's computed tokens, each [tokens, kv_heads, head_dim]."""
        group, _ = self.program.kv_places[layer]
        k, v = (pages.float().numpy() for pages in self.pages(layer))
        blocks = seq.blocks[group]
        keys = k[blocks].transpose(0, 3, 1, 2).reshape(-1, k.shape[1], k.shape[2])
        values = v[blocks].transpose(0, 2, 1, 3).reshape(-1, v.shape[1], v.shape[3])
        n = seq.num_computed
        return keys[:n].astype(np.float64), values[:n].astype(np.float64)

    def release(self, seq: Seq) -> None:
        """Give a sequence's blocks back and start it anew. What is in them stays."""
        for blocks in seq.blocks:
            self._free.extend(blocks)
        seq.blocks, seq.num_computed = [], 0

    # -- steps --------------------------------------------------------------------------------

    def step(
        self, batch: Sequence[tuple[Seq, int]], sample: Literal["all", "last"] = "all"
    ) -> list[F32Array]:
        """Run the next `n` tokens of each (sequence, n); return copies of each one's logits rows."""
        counts = self.fill(batch, sample)
        logits = self.backend.run(*counts).numpy().copy()
        results, begin = [], 0
        for seq, n in batch:
            seq.num_computed += n
            rows = n if sample == "all" else min(n, 1)
            results.append(logits[begin : begin + rows])
            begin += rows
        return results

    def rows(self, rows: Sequence[int]) -> F32Array:
        """The logits of these token ids as one sequence, which then ends: of a program that treats
        rows one by one, its output for these rows of a weight."""
        seq = Seq(list(rows))
        (result,) = self.step([(seq, len(seq.token_ids))])
        self.release(seq)
        return result

    def fill(self, batch: Sequence[tuple[Seq, int]], sample: Literal["all", "last"]) -> tuple[int, int, int]:
        """Write a step's inputs; return its numbers of tokens, sequences and sampled rows."""
        inputs = self.inputs
        inputs.block_table.fill(-1)
        token, sampled = 0, 0
        inputs.cu_q[0] = 0
        for row, (seq, n) in enumerate(batch):
            end = seq.num_computed + n
            self._grow(seq, end)
            positions = np.arange(seq.num_computed, end)
            inputs.token_ids[token : token + n] = seq.token_ids[seq.num_computed : end]
            inputs.positions[token : token + n] = positions
            inputs.rope_rows[token : token + n] = positions
            for group, blocks in enumerate(seq.blocks):
                table = np.asarray(blocks, np.int32)
                inputs.block_table[group, row, : len(table)] = table
                slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
                inputs.slot_mapping[group, token : token + n] = slots
            inputs.seq_lens[row] = end
            wanted = np.arange(token, token + n)[0 if sample == "all" else -1 :]
            inputs.sampled_rows[sampled : sampled + len(wanted)] = wanted
            token, sampled = token + n, sampled + len(wanted)
            inputs.cu_q[row + 1] = token
        return token, len(batch), sampled

    def _grow(self, seq: Seq, length: int) -> None:
        if not seq.blocks:
            seq.blocks = [[] for _ in self.program.kv_groups]
        for blocks in seq.blocks:
            while len(blocks) * BLOCK_SIZE < length:
                blocks.append(self._free.pop())


def random_values(name: str, shape: tuple[int, ...], seed: int = 0) -> F32Array:
    """Normal values, a function of the name, the shape and the seed."""
    rng = np.random.default_rng([seed, *name.encode()])
    scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def rope_values(rope: RopeTable) -> F32Array:
    """cos, then sin, of each position: computed in float64, rounded once."""
    angles = np.arange(rope.max_positions)[:, None] * np.asarray(rope.inv_freq, np.float64)
    return (np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * rope.scale).astype(np.float32)


def inv_freq(rotary_dim: int, theta: float = 10000.0) -> tuple[float, ...]:
    """The inverse frequencies of the original rotary embedding."""
    return tuple(theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))


def bits(values: F32Array) -> npt.NDArray[np.uint32]:
    """The bits of f32 values, all NaN alike."""
    pattern = np.ascontiguousarray(values, np.float32).view(np.uint32).copy()
    pattern[np.isnan(values)] = 0x7FC00000
    return pattern


def assert_same_bits(a: F32Array, b: F32Array, what: str = "") -> None:
    """Equal to the last bit, the sign of zero included."""
    assert a.shape == b.shape, f"{what}: shapes {a.shape} and {b.shape}"
    different = np.argwhere(bits(a) != bits(b))
    if len(different):
        at = tuple(different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {a.size} values differ, first at {at}: {a[at]!r} and {b[at]!r}"
        )


# -- programs ---------------------------------------------------------------------------------


def rowwise(
    columns: int, rows: int, emit: Callable[[ProgramBuilder, Buf], Buf]
) -> Callable[[ProgramBuilder], Buf]:
    """A program that applies `emit` to rows of the f32 weight "x": token id i is row i of it."""

    def build(b: ProgramBuilder) -> Buf:
        b.kv(1, 8)  # a program keeps a cache; this one does not use it
        return b.gather_sampled(emit(b, b.embedding(b.weight("x", (rows, columns)))))

    return build


@dataclass(frozen=True)
class Heads:
    """The shape of an attention layer."""

    q: int = 4
    kv: int = 2
    dim: int = 16
    window: int | None = None
    rotary_dim: int | None = None  # None: all of dim
    softcap: float | None = None
    sinks: bool = False

    @property
    def qkv_width(self) -> int:
        """Columns of q, k and v together."""
        return (self.q + 2 * self.kv) * self.dim


def attention_layer(b: ProgramBuilder, qkv: Buf, heads: Heads, max_positions: int) -> Buf:
    """Rotate, store, attend."""
    kv = b.kv(heads.kv, heads.dim, window=heads.window)
    rope = b.rope_table(inv_freq(heads.rotary_dim or heads.dim), max_positions)
    q = b.rotary_store_kv(qkv, kv, rope, q_heads=heads.q)
    sinks = b.weight("sinks", (heads.q,)) if heads.sinks else None
    return b.attention(q, kv, q_heads=heads.q, scale=heads.dim**-0.5, softcap=heads.softcap, sinks=sinks)


def attention_only(heads: Heads, rows: int, max_positions: int) -> Callable[[ProgramBuilder], Buf]:
    """Token id i has row i of the f32 weight "qkv" as its q, k and v; logits are attention's output."""

    def build(b: ProgramBuilder) -> Buf:
        qkv = b.embedding(b.weight("qkv", (rows, heads.qkv_width)))
        return b.gather_sampled(attention_layer(b, qkv, heads, max_positions))

    return build


def tiny_model(
    *, vocab: int = 96, hidden: int = 64, ffn: int = 96, layers: tuple[Heads, ...], max_positions: int
) -> Callable[[ProgramBuilder], Buf]:
    """A whole decoder with every op: tied head, biases on the first layer's qkv."""

    def build(b: ProgramBuilder) -> Buf:
        embed = b.weight("embed", (vocab, hidden))
        residual = b.embedding(embed)
        x: Buf | None = None
        for i, heads in enumerate(layers):
            norm = b.weight(f"{i}.norm", (hidden,))
            if x is None:
                h = b.rms_norm(residual, norm, eps=1e-5)
            else:
                h, residual = b.add_rms_norm(x, residual, norm, eps=1e-5)
            bias = b.weight("0.qkv.bias", (heads.qkv_width,)) if i == 0 else None
            qkv = b.linear(h, b.weight(f"{i}.qkv", (heads.qkv_width, hidden)), bias=bias)
            attended = attention_layer(b, qkv, heads, max_positions)
            x = b.linear(attended, b.weight(f"{i}.o", (hidden, heads.q * heads.dim)))
            h, residual = b.add_rms_norm(x, residual, b.weight(f"{i}.ffn_norm", (hidden,)), eps=1e-5)
            gate_up = b.linear(h, b.weight(f"{i}.gate_up", (2 * ffn, hidden)))
            x = b.linear(b.gated_activation(gate_up, "silu"), b.weight(f"{i}.down", (hidden, ffn)))
        assert x is not None
        h, _ = b.add_rms_norm(x, residual, b.weight("norm", (hidden,)), eps=1e-5)
        return b.linear(b.gather_sampled(h), embed)

    return build
