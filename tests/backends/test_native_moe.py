"""Experts on the native backend: each does what linear and gated_activation do, and a token is its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from everywhere import Emit, MakeRig, on_torch, run_everywhere
from harness import UNIT, F32Array, Rows, Seq, assert_same_bits, random_values, rowwise, stored

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.backends.native.table import EXPERT_TOKENS, NativeKernelTable
from octavo.errors import BackendError, ProgramError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, DType, Op
from octavo.program.planner import Kernel, Limits, seal
from octavo.quantization.formats import Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

KINDS = [*((format_, 16) for format_ in Format), (Format.Q4M, 8), (Format.Q4, 8)]


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts."""

    count: int = 6
    top_k: int = 3
    hidden: int = 64
    width: int = 96
    normalize: bool = True
    activation: str = "silu"
    biases: bool = False

    def emit(self, b: ProgramBuilder, x: Buf) -> Buf:
        """All of it, as one op."""
        sizes = {
            "router": (self.count, self.hidden),
            "gate_up": (2 * self.count * self.width, self.hidden),
            "down": (self.count * self.hidden, self.width),
        }
        router, gate_up, down = (b.weight(name, size) for name, size in sizes.items())
        biases = tuple(b.weight(f"{name}.bias", size[:1]) for name, size in sizes.items())
        return b.moe(
            x, router, gate_up, down, top_k=self.top_k, normalize=self.normalize,
            activation=self.activation, biases=biases if self.biases else None,  # type: ignore[arg-type]
        )  # fmt: skip

    def emit_one(self, b: ProgramBuilder, x: Buf) -> Buf:
        """One expert, of linear ops."""
        gate_up, down = b.weight("gate_up", (2 * self.width, self.hidden)), b.weight(
            "down", (self.hidden, self.width)
        )  # fmt: skip
        wide = b.weight("gate_up.bias", (2 * self.width,)) if self.biases else None
        narrow = b.weight("down.bias", (self.hidden,)) if self.biases else None
        return b.linear(
            b.gated_activation(b.linear(x, gate_up, bias=wide), self.activation), down, bias=narrow
        )

    def emit_router(self, b: ProgramBuilder, x: Buf) -> Buf:
        """The router alone."""
        bias = b.weight("router.bias", (self.count,)) if self.biases else None
        return b.linear(x, b.weight("router", (self.count, self.hidden)), bias=bias)


def part(rows: Rows, index: int, count: int) -> Rows:
    """The rows of one of `count` experts."""
    size = len(rows.raw) // count
    return Rows(rows.type_name, rows.raw[index * size : (index + 1) * size])


def expert_results(make_rig: MakeRig, experts: Experts, x: F32Array, whole: Any) -> tuple[F32Array, F32Array]:
    """Router logits [T, E] and each expert's result for each row [T, E, H], by linear ops."""
    formats = {w.name: w.format for w in whole.program.weights}
    bits = next(op for op in whole.program.ops if op.kind == "moe").activation_bits or 16

    def run(emit: Emit, bits: int, weights: dict[str, Rows]) -> F32Array:
        rig = make_rig(
            NativeBackend(1),
            rowwise(x.shape[1], len(x), emit),
            weights={**weights, "x": stored(x)},
            formats=formats,
            activation_bits=bits,
        )
        return rig.rows(range(len(x)))

    stacked = {name: parts[0] for name, parts in whole.parts.items() if name != "x"}
    routers = {name: rows for name, rows in stacked.items() if name.startswith("router")}
    others = {name: rows for name, rows in stacked.items() if name not in routers}
    results = [
        run(experts.emit_one, bits, {name: part(rows, e, experts.count) for name, rows in others.items()})
        for e in range(experts.count)
    ]
    return run(experts.emit_router, 16, routers), np.stack(results, axis=1)


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
@pytest.mark.parametrize(
    "experts",
    [
        Experts(top_k=1),
        Experts(top_k=1, count=19, width=32, hidden=32, activation="gelu_tanh"),
        Experts(top_k=1, activation="clamped_swiglu", biases=True),
    ],
)
def test_an_expert_computes_what_linear_ops_do(
    make_rig: MakeRig, experts: Experts, format_: Format, activation_bits: int
) -> None:
    """With one expert a token, whose share is then 1: the same bits."""
    x = random_values("x", (70, experts.hidden)) * 3
    out, rig = run_everywhere(
        make_rig,
        experts.emit,
        x,
        formats=dict.fromkeys(("router", "gate_up", "down"), format_),
        activation_bits=activation_bits,
    )
    logits, results = expert_results(make_rig, experts, x, rig)
    chosen = logits.argmax(axis=1)
    assert len(set(chosen.tolist())) > 3
    assert_same_bits(out, results[np.arange(70), chosen])


@pytest.mark.parametrize(
    "experts",
    [
        Experts(),
        Experts(normalize=False),
        Experts(count=4, top_k=4),
        Experts(count=130, top_k=8, width=16, hidden=32),
        Experts(activation="clamped_swiglu", biases=True),
    ],
)
def test_results_are_added_by_their_shares(make_rig: MakeRig, experts: Experts) -> None:
    x = random_values("x", (40, experts.hidden)) * 3
    formats = {"gate_up": Format.BF16, "down": Format.F16}
    out, rig = run_everywhere(make_rig, experts.emit, x, formats=formats)
    logits, results = expert_results(make_rig, experts, x, rig)
    shares = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    best = np.argsort(-logits, axis=1, kind="stable")[:, : experts.top_k]
    shares = np.take_along_axis(shares, best, axis=1)
    if experts.normalize:
        shares /= shares.sum(axis=1, keepdims=True)
    taken = np.take_along_axis(results, best[:, :, None], axis=1).astype(np.float64)
    exact = (shares[:, :, None] * taken).sum(axis=1)
    size = (shares[:, :, None] * np.abs(taken)).sum(axis=1)
    # exp's argument, of up to 30, and exp itself: 34 units; a sum of all, a quotient or two, a sum of k
    assert (np.abs(out - exact) <= (2 * (34 + experts.count / 8 + 8) + experts.top_k) * UNIT * size).all()
    by_torch = on_torch(make_rig, experts.emit, x, formats=formats)
    np.testing.assert_allclose(out, by_torch, atol=1e-5 * np.abs(out).max())


def test_ties_go_to_the_smaller_expert(make_rig: MakeRig) -> None:
    experts = Experts(count=9, top_k=1)
    rows = random_values("router", (9, 64))
    rows[[2, 5, 7]] = rows[4] = rows[[2]] * 3
    x = np.sign(rows[2]) * np.abs(random_values("x", (5, 64)))
    out, rig = run_everywhere(make_rig, experts.emit, x, weights={"router": stored(rows)})
    _, results = expert_results(make_rig, experts, x, rig)
    assert_same_bits(out, results[:, 2])


def test_a_nan_stays_in_its_row(make_rig: MakeRig) -> None:
    for formats in ({}, dict.fromkeys(("router", "gate_up", "down"), Format.Q4M)):
        x = random_values("x", (9, 64))
        x[2, 7], x[5, 20] = np.nan, np.inf
        dirty, _ = run_everywhere(make_rig, Experts().emit, x, formats=formats)
        clean, _ = run_everywhere(make_rig, Experts().emit, np.nan_to_num(x, posinf=0), formats=formats)
        others = [0, 1, 3, 4, 6, 7, 8]
        assert_same_bits(dirty[others], clean[others])
        assert np.isnan(dirty[[2, 5]]).all()


@pytest.mark.parametrize("format_", [Format.BF16, Format.Q4M])
def test_steps_longer_than_a_chunk(make_rig: MakeRig, format_: Format) -> None:
    """Steps of more tokens than go together, of exactly as many, and of none."""
    experts = Experts(count=40, top_k=4, width=32, hidden=32)
    tokens = 2 * EXPERT_TOKENS + 77
    x = random_values("x", (tokens, 32))
    outs = []
    for most in (tokens, 96):
        rig = make_rig(
            NativeBackend(2),
            rowwise(32, tokens, experts.emit),
            weights={"x": stored(x)},
            formats=dict.fromkeys(("gate_up", "down"), format_),
            limits=Limits(most, 2, most, tokens),
            num_blocks=tokens // 16 + 3,
        )
        assert rig.backend.run(0, 0, 0).shape == (0, 32)
        parts = [rig.rows(range(i, min(i + most, tokens))) for i in range(0, tokens, most)]
        outs.append(np.concatenate(parts))
        if most == tokens:
            assert_same_bits(rig.rows(range(EXPERT_TOKENS)), outs[0][:EXPERT_TOKENS])
            assert_same_bits(rig.step([(Seq([tokens - 1]), 1)])[0], outs[0][-1:])
    assert_same_bits(outs[0], outs[1])


# -- what is refused, and billed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Experts(width=24), "moe: experts of 24 rows are not a multiple of 16"),
        (Experts(hidden=40), "moe: experts of 40 rows are not a multiple of 16"),
    ],
)
def test_experts_that_share_a_panel_are_declined(experts: Experts, reason: str) -> None:
    builder = ProgramBuilder("test", format_of=lambda parts: Format.F32, kv_dtype=DType.F16)
    program = builder.build(rowwise(experts.hidden, 8, experts.emit)(builder))
    with pytest.raises(ProgramError, match=reason):
        seal(program, Limits(8, 2, 8, 64), NativeKernelTable(1))


class ShortTable(NativeKernelTable):
    """Bills one byte less than it should for experts."""

    def choose(self, op: Op, limits: Limits) -> Kernel:
        """The kernel, short of scratch."""
        kernel = super().choose(op, limits)
        return replace(kernel, scratch_nbytes=kernel.scratch_nbytes - (op.kind == "moe"))


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
@pytest.mark.parametrize("max_tokens", [1, 37, 1000])
def test_scratch_is_the_librarys_to_the_byte(
    make_rig: MakeRig, format_: Format, activation_bits: int, max_tokens: int
) -> None:
    for router, down in ((Format.F32, format_), (format_, Format.F32)):
        options = {
            "limits": Limits(max_tokens, 3, 5, 64),
            "formats": {"router": router, "gate_up": format_, "down": down},
            "activation_bits": activation_bits,
        }
        build = rowwise(64, 8, Experts(count=35).emit)
        make_rig(NativeBackend(3), build, **options)
        backend = NativeBackend(3)
        backend.table = ShortTable(3)
        with pytest.raises(BackendError, match=r"op \d+ \(moe\), \d+ bytes of scratch memory, but"):
            make_rig(backend, build, **options)
        backend.close()
