"""Builds programs: what a model file holds in its hands.

Rule: every method checks shapes, emits one op and returns its output handle. What can't be is
refused here, with the values, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import ProgramError
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
    Program,
    QKNorm,
    RMSNorm,
    RopeTable,
    RotaryStoreKV,
    ScaleLogits,
    Shape,
    Shard,
    Weight,
)
from octavo.program.kv_groups import assign_groups
from octavo.quantization.formats import GROUP, Format


class ProgramBuilder:
    """Collects the ops of one program.

    format_of: which format holds the named checkpoint tensors, stacked; asked once per weight.
    kv_dtype: the element type of the KV cache. activation_bits: what activations are quantised to
    where they meet weights of 4 bits, feed_forward_bits: in feed-forward layers.
    """

    def __init__(
        self,
        name: str,
        *,
        format_of: Callable[[tuple[str, ...]], Format],
        kv_dtype: DType,
        activation_bits: int = 16,
        feed_forward_bits: int = 16,
    ) -> None:
        self._name = name
        self._format_of = format_of
        self._kv_dtype = kv_dtype
        self._activation_bits = activation_bits
        self._feed_forward_bits = feed_forward_bits
        self._ops: list[Op] = []
        self._weights: dict[str, Weight] = {}
        self._ropes: list[RopeTable] = []
        self._kv: list[KV] = []
        self._num_bufs = 0

    # -- parameters ---------------------------------------------------------------------------

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        parts: tuple[str, ...] | None = None,
        shard: Shard = Shard.REPLICATED,
        offset: float = 0.0,
    ) -> Weight:
        """A parameter, stacked by rows from `parts` of the checkpoint (default: the tensor `name`).

        offset: added to a vector's elements when it is loaded.
        """
        if name in self._weights:
            raise ProgramError(f"weight {name!r} is declared twice; keep the first handle to share it")
        parts = parts or (name,)
        format_ = self._format_of(parts)
        if len(shape) == 1:
            format_ = Format.F32
        elif format_.quantized and shape[1] % GROUP:
            raise ProgramError(
                f"weight {name!r} is {format_} with rows of {shape[1]}: not a multiple of its group, {GROUP}"
            )
        if offset and len(shape) != 1:
            raise ProgramError(f"weight {name!r} is a matrix; only vectors are loaded with an offset")
        weight = Weight(len(self._weights), name, shape, format_, parts, shard, offset)
        self._weights[name] = weight
        return weight

    def rope_table(
        self,
        inv_freq: tuple[float, ...],
        max_positions: int,
        *,
        scale: float = 1.0,
        boundary: int | None = None,
        long_inv_freq: tuple[float, ...] = (),
    ) -> RopeTable:
        """The table of a rotary embedding with these inverse frequencies (radians per position).

        boundary: sequences of more tokens turn by long_inv_freq; the same for all tables.
        """
        table = RopeTable(len(self._ropes), max_positions, inv_freq, scale, boundary, long_inv_freq)
        if any(other.boundary != boundary for other in self._ropes):
            raise ProgramError(f"{table} changes at {boundary} positions, another table elsewhere")
        self._ropes.append(table)
        return table

    def kv(self, kv_heads: int, head_dim: int, *, window: int | None = None) -> KV:
        """The KV cache of the next layer."""
        if kv_heads < 1 or head_dim < 1 or (window is not None and window < 1):
            raise ProgramError(
                f"layer {len(self._kv)} can't keep KV of {kv_heads} heads of {head_dim} elements"
                + ("" if window is None else f", window {window}")
            )
        kv = KV(len(self._kv), kv_heads, head_dim, self._kv_dtype, window)
        self._kv.append(kv)
        return kv

    # -- ops ----------------------------------------------------------------------------------

    def embedding(self, weight: Weight, *, scale: float = 1.0) -> Buf:
        """token_ids -> [T, K]."""
        self._parameter(weight, 2, "embedding")
        out = self._buf((Dim.TOKENS, weight.shape[1]))
        return self._emit(Embedding(out=out, weight=weight, scale=scale))

    def rms_norm(self, x: Buf, weight: Weight, *, eps: float) -> Buf:
        """[*, K] -> [*, K]."""
        self._parameter(weight, 1, "rms_norm")
        self._expect(x, weight.shape[0], weight)
        return self._emit(RMSNorm(out=self._buf(x.shape), x=x, weight=weight, eps=eps))

    def add(self, x: Buf, residual: Buf, *, x_scale: float | None = None) -> Buf:
        """residual + x_scale * x, both [*, K]."""
        self._handle(residual, "add")
        self._expect(x, residual.width, "add")
        if x.shape != residual.shape:
            raise ProgramError(f"add adds {x} {x.shape} to {residual} {residual.shape}")
        return self._emit(Add(out=self._buf(x.shape), x=x, residual=residual, x_scale=x_scale))

    def add_rms_norm(
        self, x: Buf, residual: Buf, weight: Weight, *, eps: float, x_scale: float | None = None
    ) -> tuple[Buf, Buf]:
        """(x, residual) -> (normed sum, sum), both [*, K]; the sum is residual + x_scale * x."""
        self._parameter(weight, 1, "add_rms_norm")
        self._expect(x, weight.shape[0], weight)
        self._expect(residual, weight.shape[0], weight)
        if x.shape != residual.shape:
            raise ProgramError(f"add_rms_norm adds {x} {x.shape} to {residual} {residual.shape}")
        total = self._buf(x.shape)
        op = AddRMSNorm(
            out=self._buf(x.shape), x=x, residual=residual, weight=weight, eps=eps, out_sum=total,
            x_scale=x_scale,
        )  # fmt: skip
        return self._emit(op), total

    def linear(
        self, x: Buf, weight: Weight, *, bias: Weight | None = None, feed_forward: bool = False
    ) -> Buf:
        """[*, K] -> [*, N]."""
        self._parameter(weight, 2, "linear")
        self._expect(x, weight.shape[1], weight)
        if bias is not None:
            self._parameter(bias, 1, "the bias of linear")
            if bias.shape != (weight.shape[0],):
                raise ProgramError(f"bias {bias} {bias.shape} does not fit {weight} {weight.shape}")
        out = self._buf((x.rows, weight.shape[0]))
        width = self._feed_forward_bits if feed_forward else self._activation_bits
        bits = width if weight.format.is_4_bit else None
        return self._emit(Linear(out=out, x=x, weight=weight, bias=bias, activation_bits=bits))

    def qk_norm(
        self, qkv: Buf, q_weight: Weight, k_weight: Weight, *, q_heads: int, kv_heads: int, eps: float
    ) -> Buf:
        """[T, (H + 2 HK) D] -> the same, q and k normalised: per head by weights [D], or all heads of a
        token together by weights [H D] and [HK D]."""
        self._tokens(qkv, "qk_norm")
        self._parameter(q_weight, 1, "qk_norm")
        self._parameter(k_weight, 1, "qk_norm")
        dim, rest = divmod(qkv.width, q_heads + 2 * kv_heads)
        sizes = (q_weight.shape[0], k_weight.shape[0])
        if rest or sizes not in ((dim, dim), (q_heads * dim, kv_heads * dim)):
            raise ProgramError(
                f"qk_norm of {qkv}, {q_heads} + 2 * {kv_heads} heads in {qkv.width} columns, can't use "
                f"weights of {sizes[0]} and {sizes[1]}"
            )
        op = QKNorm(
            out=self._buf(qkv.shape), qkv=qkv, q_weight=q_weight, k_weight=k_weight,
            q_heads=q_heads, kv_heads=kv_heads, eps=eps,
        )  # fmt: skip
        return self._emit(op)

    def rotary_store_kv(self, qkv: Buf, kv: KV, rope: RopeTable, *, q_heads: int) -> Buf:
        """[T, (H + 2 HK) D] -> q [T, H D]; k and v go to the cache."""
        self._tokens(qkv, "rotary_store_kv")
        width = (q_heads + 2 * kv.kv_heads) * kv.head_dim
        if qkv.width != width:
            raise ProgramError(
                f"rotary_store_kv wants {width} = ({q_heads} + 2 * {kv.kv_heads}) * {kv.head_dim} columns, "
                f"but {qkv} has {qkv.width}"
            )
        if rope.rotary_dim > kv.head_dim:
            raise ProgramError(f"{rope} rotates {rope.rotary_dim} elements of heads of {kv.head_dim}")
        out = self._buf((Dim.TOKENS, q_heads * kv.head_dim))
        return self._emit(RotaryStoreKV(out=out, qkv=qkv, kv=kv, rope=rope, q_heads=q_heads))

    def attention(
        self,
        q: Buf,
        kv: KV,
        *,
        q_heads: int,
        scale: float,
        softcap: float | None = None,
        sinks: Weight | None = None,
    ) -> Buf:
        """q [T, H D] -> [T, H D]. sinks: [H]."""
        self._tokens(q, "attention")
        self._expect(q, q_heads * kv.head_dim, kv)
        if q_heads % kv.kv_heads:
            raise ProgramError(f"{q_heads} query heads cannot share {kv.kv_heads} KV heads evenly")
        if sinks is not None:
            self._parameter(sinks, 1, "attention")
            if sinks.shape != (q_heads,):
                raise ProgramError(f"sinks {sinks} {sinks.shape} are not one for each of {q_heads} heads")
        op = Attention(
            out=self._buf(q.shape), q=q, kv=kv, q_heads=q_heads, scale=scale, softcap=softcap, sinks=sinks
        )
        return self._emit(op)

    def gated_activation(self, x: Buf, activation: str) -> Buf:
        """[*, 2 F] -> [*, F]."""
        self._handle(x, "gated_activation")
        if activation not in ACTIVATIONS:
            raise ProgramError(f"activation {activation!r} is unknown; known: {', '.join(ACTIVATIONS)}")
        if x.width % 2:
            raise ProgramError(f"gated_activation halves {x}, which has {x.width} columns")
        out = self._buf((x.rows, x.width // 2))
        return self._emit(GatedActivation(out=out, x=x, activation=activation))

    def moe(
        self,
        x: Buf,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        *,
        top_k: int,
        normalize: bool,
        activation: str,
        biases: tuple[Weight, Weight, Weight] | None = None,
    ) -> Buf:
        """[T, H] -> [T, H] through top_k of the experts stacked in the weights. biases: of the router [E],
        of gate and up [E 2 F], and of down [E H]."""
        self._tokens(x, "moe")
        for weight in (router, gate_up, down):
            self._parameter(weight, 2, "moe")
        experts, hidden = router.shape
        width = gate_up.shape[0] // (2 * experts)
        if x.width != hidden or gate_up.shape != (2 * experts * width, hidden):
            raise ProgramError(f"moe of {x} [{x.width}] can't use {router} {router.shape}, {gate_up.shape}")
        if down.shape != (experts * hidden, width) or not 0 < top_k <= experts:
            raise ProgramError(f"moe of {experts} experts can't use {down} {down.shape}, top_k {top_k}")
        if activation not in ACTIVATIONS:
            raise ProgramError(f"activation {activation!r} is unknown; known: {', '.join(ACTIVATIONS)}")
        for bias, matrix in zip(biases or (), (router, gate_up, down), strict=bool(biases)):
            self._parameter(bias, 1, "a bias of moe")
            if bias.shape != matrix.shape[:1]:
                raise ProgramError(f"bias {bias} {bias.shape} does not fit {matrix} {matrix.shape}")
        of_router, of_gate_up, of_down = biases or (None, None, None)
        bits = self._feed_forward_bits if gate_up.format.is_4_bit or down.format.is_4_bit else None
        op = MoE(
            out=self._buf(x.shape), x=x, router=router, gate_up=gate_up, down=down, num_experts=experts,
            top_k=top_k, normalize=normalize, activation=activation,
            activation_bits=bits, router_bias=of_router,
            gate_up_bias=of_gate_up, down_bias=of_down,
        )  # fmt: skip
        return self._emit(op)

    def gather_sampled(self, x: Buf) -> Buf:
        """[T, K] -> [R, K]: the rows whose logits are wanted."""
        self._tokens(x, "gather_sampled")
        return self._emit(GatherRows(out=self._buf((Dim.SAMPLED, x.width)), x=x))

    def scale_logits(self, x: Buf, *, scale: float = 1.0, softcap: float | None = None) -> Buf:
        """[R, V] -> [R, V]."""
        self._handle(x, "scale_logits")
        return self._emit(ScaleLogits(out=self._buf(x.shape), x=x, scale=scale, softcap=softcap))

    # -- the end ------------------------------------------------------------------------------

    def build(self, logits: Buf) -> Program:
        """The finished program, whose result is `logits` [R, vocab]."""
        self._handle(logits, "build")
        if logits.rows is not Dim.SAMPLED:
            raise ProgramError(f"logits {logits} have rows {logits.rows}; gather the sampled rows first")
        if not self._kv:
            raise ProgramError(f"program {self._name!r} keeps no KV cache")
        groups = assign_groups(self._kv)
        return Program(
            name=self._name,
            ops=tuple(self._ops),
            weights=tuple(self._weights.values()),
            ropes=tuple(self._ropes),
            kv_layers=tuple(self._kv),
            kv_groups=groups,
            logits=logits,
            vocab_size=logits.width,
            kv_places={
                layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)
            },
        )

    def _buf(self, shape: Shape) -> Buf:
        buf = Buf(self._num_bufs, DType.F32, shape)
        self._num_bufs += 1
        return buf

    def _emit(self, op: Op) -> Buf:
        self._ops.append(op)
        return op.out

    def _parameter(self, weight: Weight, num_dims: int, by: str) -> None:
        if not isinstance(weight, Weight):
            raise ProgramError(f"{by} was given {weight!r}; it takes a weight of {num_dims} dimensions")
        if len(weight.shape) != num_dims:
            raise ProgramError(f"{by} takes a weight of {num_dims} dimensions; {weight} is {weight.shape}")

    def _handle(self, x: Buf, by: object) -> None:
        if not isinstance(x, Buf):
            raise ProgramError(f"{by} was given {x!r}; ops take handles of activations")

    def _tokens(self, x: Buf, by: object) -> None:
        self._handle(x, by)
        if x.rows is not Dim.TOKENS:
            raise ProgramError(f"{by} takes a row for each token, but {x} has rows {x.rows}")

    def _expect(self, x: Buf, width: int, by: object) -> None:
        self._handle(x, by)
        if x.width != width:
            raise ProgramError(f"{x} has {x.width} columns, but {by} wants {width}")
