"""The program: what a model is, on every device.

A model file builds a list of ops over symbolic handles, once. Backends interpret the list. This
file is the contract between them: shapes, dtypes, and for every reduction its order.

Rule: an output row is a function of its own inputs alone, by one sequence of operations whatever
else is in the step. Backends may differ from each other by rounding, never from themselves.

Notation: T, S, R are the step's tokens, sequences and sampled rows. `fma(a, b, c)` rounds once.
`lanes8(x)` sums a vector in eight virtual lanes (element i in lane i % 8, in order of i) and then
the lanes as ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7)).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NoReturn

from octavo.errors import ProgramError
from octavo.quantization.formats import Format

#: Tokens in a KV block, for every model and device.
BLOCK_SIZE = 16
#: Attention reduces KV in tiles of this many positions, aligned to absolute position.
KV_TILE = 64
#: Tiles are folded online within a split of this many positions; splits are merged in order.
KV_SPLIT = 512
#: What a gated activation may be.
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


class Dim(enum.StrEnum):
    """A dimension whose size is known when a step runs."""

    TOKENS = "T"
    SEQS = "S"
    SAMPLED = "R"


class DType(enum.StrEnum):
    """Element types of buffers and of the KV cache."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.F32 else 2


Shape = tuple[Dim | int, ...]


class _Handle:
    """A name without data. Whatever would compute on it fails here, while the model is built."""

    __slots__ = ()

    def _refuse(self, what: str) -> NoReturn:
        raise ProgramError(
            f"{what} was applied to {self}, but a model file builds a program and computes nothing: "
            "handles have no data. Emit an op of the ProgramBuilder (b.linear, b.rms_norm, ...) instead"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        del types
        name = getattr(func, "__name__", str(func))
        handle = next(_handles_in([*args, *(kwargs or {}).values()]))  # nested in torch.cat([x, y])
        handle._refuse(f"torch.{name}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self} has no attribute {name!r}: a model file builds a program and computes nothing. "
            "Emit an op of the ProgramBuilder (b.linear, b.rms_norm, ...) instead"
        )


def _handles_in(values: Iterable[Any]) -> Iterator[_Handle]:
    for value in values:
        if isinstance(value, _Handle):
            yield value
        elif isinstance(value, list | tuple):
            yield from _handles_in(value)


def _refused(what: str) -> Callable[..., NoReturn]:
    def method(self: _Handle, *_: Any, **__: Any) -> NoReturn:
        self._refuse(what)

    return method


# == and != are left: they compare handles, which are keys of dictionaries.
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_OTHER = {
    "lt": "<", "gt": ">", "le": "<=", "ge": ">=", "neg": "-", "pos": "+", "invert": "~",
}  # fmt: skip
for _name, _symbol in _BINARY.items():
    for _prefix in ("", "r"):
        setattr(_Handle, f"__{_prefix}{_name}__", _refused(f"the operator {_symbol!r}"))
for _name, _symbol in _OTHER.items():
    setattr(_Handle, f"__{_name}__", _refused(f"the operator {_symbol!r}"))
for _name, _what in {
    "bool": "a truth test", "len": "len()", "iter": "iteration", "contains": "the operator 'in'",
    "getitem": "indexing", "setitem": "an assignment to an index", "call": "a call",
    "float": "float()", "int": "int()", "index": "the use as an index", "complex": "complex()",
    "abs": "abs()", "divmod": "divmod()", "rdivmod": "divmod()", "round": "round()",
    "trunc": "math.trunc()", "floor": "math.floor()", "ceil": "math.ceil()",
    "array": "a numpy operation",
}.items():  # fmt: skip
    setattr(_Handle, f"__{_name}__", _refused(_what))


@dataclass(frozen=True, slots=True)
class Buf(_Handle):
    """An activation. Rows are contiguous; the first dimension is the number of rows."""

    id: int
    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"%{self.id}"

    @property
    def width(self) -> int:
        """Elements of one row."""
        width = 1
        for dim in self.shape[1:]:
            assert isinstance(dim, int)
            width *= dim
        return width

    @property
    def rows(self) -> Dim:
        """The dimension that says how many rows a step has."""
        dim = self.shape[0]
        assert isinstance(dim, Dim)
        return dim


class Shard(enum.StrEnum):
    """How tensor parallelism splits a weight."""

    REPLICATED = "replicated"
    ROWS = "rows"  # output features
    COLUMNS = "columns"  # input features: partial sums, all-reduced


@dataclass(frozen=True, slots=True)
class Weight(_Handle):
    """A parameter of shape [N, K] (y = x W^T) or [N], stacked by rows from checkpoint tensors."""

    id: int
    name: str
    shape: tuple[int, ...]
    format: Format
    parts: tuple[str, ...]  # names in the checkpoint, as Hugging Face spells them
    shard: Shard
    offset: float = 0.0  # added to a vector when it is loaded: Gemma's norms multiply with 1 + w

    def __str__(self) -> str:
        return f"@{self.name}"


@dataclass(frozen=True, slots=True)
class RopeTable(_Handle):
    """cos and sin of every position, [rows, rotary_dim] f32: cos in the first half.

    Angles are position * inv_freq[i] in float64, rounded to f32 once, after cos and sin. With a boundary,
    sequences of more tokens than that turn by long_inv_freq:

        row 0 .. boundary             position 0 .. boundary, by inv_freq
        row boundary ..               position 0 .. max_positions, by long_inv_freq
    """

    id: int
    max_positions: int
    inv_freq: tuple[float, ...]  # rotary_dim / 2 of them
    scale: float = 1.0  # multiplies cos and sin (yarn, longrope)
    boundary: int | None = None
    long_inv_freq: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"$rope{self.id}"

    @property
    def rotary_dim(self) -> int:
        """How many of a head's elements are rotated."""
        return 2 * len(self.inv_freq)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.max_positions + (self.boundary or 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.num_rows * self.rotary_dim * 4


@dataclass(frozen=True, slots=True)
class KV(_Handle):
    """The KV cache of one layer: pages of BLOCK_SIZE tokens, in the dtype of the cache.

    A page holds K as [kv_heads][head_dim][BLOCK_SIZE] and then V as [kv_heads][BLOCK_SIZE][head_dim]:
    K is read a dimension at a time over tokens, V a token at a time over dimensions.
    """

    layer: int
    kv_heads: int
    head_dim: int
    dtype: DType
    window: int | None = None

    def __str__(self) -> str:
        return f"kv{self.layer}"

    @property
    def page_nbytes(self) -> int:
        """Bytes of one layer's block."""
        return 2 * self.kv_heads * self.head_dim * BLOCK_SIZE * self.dtype.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: Bufs it reads, Bufs it writes, and frozen attributes."""

    out: Buf
    kind: ClassVar[str]

    @property
    def reads(self) -> tuple[Buf, ...]:
        """Activations read."""
        values = (getattr(self, f.name) for f in fields(self) if not f.name.startswith("out"))
        return tuple(v for v in values if isinstance(v, Buf))

    @property
    def writes(self) -> tuple[Buf, ...]:
        """Activations written."""
        values = (getattr(self, f.name) for f in fields(self) if f.name.startswith("out"))
        return tuple(v for v in values if isinstance(v, Buf))

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Parameters read."""
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(v for v in values if isinstance(v, Weight))

    @property
    def attributes(self) -> dict[str, Any]:
        """What is neither activation nor parameter."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {k: v for k, v in pairs if not isinstance(v, _Handle) and v is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding(Op):
    """out[t, :] = scale * dequantised W[token_ids[t], :].   out [T, K] f32, W [vocab, K].

    Dequantisation rounds as f32: q4m d * q + m (two roundings); q4 d * (q - 8) and q8, q8g16 d * q are exact.
    """

    weight: Weight
    scale: float = 1.0
    kind: ClassVar[str] = "embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm(Op):
    """out = (x * r) * w, with r = 1 / sqrt(lanes8(x * x) / K + eps).   x, out [*, K] f32, w [K] f32.

    The lanes accumulate with fma(x, x, lane).
    """

    x: Buf
    weight: Weight
    eps: float
    kind: ClassVar[str] = "rms_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Add(Op):
    """out = residual + x_scale * x.   All [*, K] f32. out may lie where residual lies.

    The product rounds before the sum; without x_scale there is none.
    """

    x: Buf
    residual: Buf
    x_scale: float | None = None
    kind: ClassVar[str] = "add"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRMSNorm(Op):
    """out_sum = residual + x_scale * x, as Add;  out = RMSNorm(out_sum).   All [*, K] f32.

    out_sum may lie where residual lies: rows are independent and elements are read before written.
    """

    x: Buf
    residual: Buf
    weight: Weight
    eps: float
    out_sum: Buf
    x_scale: float | None = None
    kind: ClassVar[str] = "add_rms_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Op):
    """out = x W^T + bias.   x [*, K] f32, W [N, K], bias [N] f32 or none, out [*, N] f32.

    f32      acc = fma(W[n, k], x[k], acc) for k = 0 .. K-1.
    q4m      x is quantised per row and group of 32: s = max|x| / top, i = rint(x * (top / max|x|))
             (s = 0 and i = 0 in a group of zeros), c = s * sum(i); top as `activation_top` says.
             For each group in order: acc = fma(float(sum_k q*i), d * s, acc); acc = fma(m, c, acc).
    q4       likewise with q - 8 for q, and without m.
    q8       likewise, without m.
    q8g16    likewise, without m, but a group's two halves of 16 have scales d of their own, and acc takes
             them in order.
    Then acc + bias. rint rounds half to even; all products and quotients above round as f32. A group's
    integer sums stay below 2**24, so their conversion to f32 is exact.

    activation_bits: with q4 and q4m, 16 or 8: half the work and a rougher answer.
    """

    x: Buf
    weight: Weight
    bias: Weight | None = None
    activation_bits: int | None = None
    kind: ClassVar[str] = "linear"

    @property
    def activation_top(self) -> int:
        """The largest integer that a quantised activation becomes."""
        if self.weight.format in (Format.Q8, Format.Q8G16):
            return 4095
        return 127 if self.activation_bits == 8 else 32767


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(Op):
    """RMSNorm of q and k; v as it is.   qkv, out [T, (H + 2 HK) D] f32.

    Weights of D: each head is normalised alone. Weights of H D and HK D: all heads of a token together.
    """

    qkv: Buf
    q_weight: Weight
    k_weight: Weight
    q_heads: int
    kv_heads: int
    eps: float
    kind: ClassVar[str] = "qk_norm"

    @property
    def head_dim(self) -> int:
        """D."""
        return self.qkv.width // (self.q_heads + 2 * self.kv_heads)

    @property
    def together(self) -> bool:
        """Whether all heads of a token are normalised together."""
        return (self.q_weight.shape[0], self.k_weight.shape[0]) != (self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryStoreKV(Op):
    """Rotate q and k, append k and v to the cache.   qkv [T, (H + 2 HK) D] f32, out (q) [T, H D] f32.

    For the first rotary_dim elements of each head of q and k, with i < rotary_dim / 2 and
    j = i + rotary_dim / 2, at p = rope_rows[t] (the token's position where the table has no boundary):
        y[i] = x[i] * cos[p, i] - x[j] * sin[p, i];   y[j] = x[j] * cos[p, i] + x[i] * sin[p, i]
    Products round before the sum (no fma). k and v are rounded to the cache's dtype, to nearest even,
    and written to slot_mapping[group][t] = block * BLOCK_SIZE + offset.
    """

    qkv: Buf
    kv: KV
    rope: RopeTable
    q_heads: int
    kind: ClassVar[str] = "rotary_store_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """Causal attention of each token to its sequence's KV [0, position], straight from the cache.

    q, out [T, H D] f32. Query head h reads KV head h // (H / HK). With a window W, a token at p sees
    (p - W, p]. KV written by RotaryStoreKV in this step is seen.

    Per token and head, with qs = q * scale:
      split   KV positions in splits of KV_SPLIT, in order; each starts from m = -inf, l = 0, o = 0.
      tile    within a split, tiles of KV_TILE, in order; tiles with no visible position are skipped.
              score[t] = chain over d of fma(qs[d], k[t][d], acc); with a softcap c it becomes
              c * tanh(score / c), tanh as in GatedActivation;
              an invisible position is -inf.
              m' = max(m, max score); f = exp(m - m') (0 when m is -inf); p = exp(score - m')
              l = l * f + lanes8(p); o[d] = o[d] * f, then fma(p[t], v[t][d], o[d]) for t in order,
              over visible t only: what is masked is never multiplied, so a NaN there stays there.
      merge   splits fold left: M' = max(M, m); a = exp(M - M'), b = exp(m - M');
              L = L * a + l * b; O = O * a + o * b; products round before sums.
      sink    with sinks [H] f32, a last split with m = sinks[h], l = 1, o = 0 is merged: a score that
              takes its share of attention and gives nothing (gpt-oss).
      out = O / L.
    exp is the polynomial of the backend; 0 below -87.
    """

    q: Buf
    kv: KV
    q_heads: int
    scale: float
    softcap: float | None = None
    sinks: Weight | None = None
    kind: ClassVar[str] = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation(Op):
    """out = act(x[:, :F]) * x[:, F:].   x [*, 2 F] f32, out [*, F] f32.

    With g and u an element of either half; every operation rounds, in the order of the brackets:
      silu            (g / (1 + exp(-g))) u
      gelu_tanh       ((0.5 g) (1 + tanh((g + ((g g) g) 0.044715) s))) u, s = sqrt(2 / pi)
      clamped_swiglu  (u' + 1) (g' / (1 + exp(-1.702 g'))), g' = min(g, 7), u' = u clamped to [-7, 7]
                      (gpt-oss)
    exp's argument is at most 87. tanh(y) is (1 - e) / (1 + e) with e = exp(-2 |y|), negated where y < 0.
    """

    x: Buf
    activation: str
    kind: ClassVar[str] = "gated_activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE(Op):
    """out = sum over a token's experts e, best first, of share_e * down_e(act(gate_e x) * up_e x).

    x, out [T, H] f32; router [E, H], gate_up [E 2 F, H], down [E H, F]; biases [E], [E 2 F], [E H]. Products
    are Linear's, the router's always with activations of 16 bits; act(gate) * up is GatedActivation's.
    With y = router x and m its largest element, share_e = exp(y_e - m) / lanes8(exp(y - m)). The top_k
    largest are taken, best first, ties to the smaller id; normalize: each is divided by their sum, which is
    added best first. Each product with a share rounds, and is then added.
    """

    x: Buf
    router: Weight
    gate_up: Weight
    down: Weight
    num_experts: int
    top_k: int
    normalize: bool
    activation: str
    activation_bits: int | None = None
    router_bias: Weight | None = None
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    kind: ClassVar[str] = "moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows(Op):
    """out[r, :] = x[sampled_rows[r], :].   x [T, K] f32, out [R, K] f32."""

    x: Buf
    kind: ClassVar[str] = "gather_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLogits(Op):
    """out = scale * x; with a softcap c * tanh((scale * x) / c).   x, out [R, V] f32; may be one buffer.

    tanh as in GatedActivation.
    """

    x: Buf
    scale: float
    softcap: float | None = None
    kind: ClassVar[str] = "scale_logits"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: all full attention, or all the same window.

    `layers[i]` keeps its pages in storage i, at the group's block ids.
    """

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A model as a listing: ops in order, the parameters they read, the cache they keep."""

    name: str
    ops: tuple[Op, ...]
    weights: tuple[Weight, ...]
    ropes: tuple[RopeTable, ...]
    kv_layers: tuple[KV, ...]
    kv_groups: tuple[KVGroup, ...]
    logits: Buf
    vocab_size: int
    #: layer -> (group, storage)
    kv_places: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def rope_boundary(self) -> int | None:
        """Sequences of more tokens than this turn otherwise, from their first token on."""
        return self.ropes[0].boundary if self.ropes else None

    @property
    def num_storages(self) -> int:
        """Page storages: a block id names one page in each."""
        return max(len(group.layers) for group in self.kv_groups)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one layer's block; the same for every layer."""
        return self.kv_layers[0].page_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all storages."""
        return self.page_nbytes * self.num_storages
