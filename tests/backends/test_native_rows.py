"""Embedding, norms, gated activation and gather on the native backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness import (
    NATIVE_VARIANTS,
    UNIT,
    F32Array,
    Rig,
    Seq,
    assert_same_bits,
    fma,
    random_values,
    rowwise,
    stored,
)

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf
from octavo.quantization.formats import Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

MakeRig = Callable[..., Rig]
Emit = Callable[[ProgramBuilder, Buf], Buf]


def run_everywhere(make_rig: MakeRig, emit: Emit, x: F32Array, **rig_options: object) -> tuple[F32Array, Rig]:
    """An op's output for the rows of x, after checking that every build and thread count agrees, and
    each row alone with all together."""
    build = rowwise(x.shape[1], len(x), emit)
    outs, rigs = [], []
    for isa, threads in NATIVE_VARIANTS:
        rigs.append(make_rig(NativeBackend(threads, isa), build, weights={"x": stored(x)}, **rig_options))
        outs.append(rigs[-1].rows(range(len(x))))
        assert_same_bits(outs[-1], outs[0], f"{isa}, {threads} threads")
    for row in range(len(x)):
        assert_same_bits(rigs[-1].rows([row]), outs[0][row : row + 1], f"row {row} alone")
    return outs[0], rigs[-1]


def contract_rms_norm(x: F32Array, w: F32Array, eps: float) -> F32Array:
    """RMSNorm as program/ir.py spells it."""
    lanes = np.zeros((len(x), 8), np.float32)
    for k in range(0, x.shape[1], 8):
        eight = x[:, k : k + 8]
        lanes = fma(eight, eight, lanes)
    a, b, c, d = (lanes[:, i] + lanes[:, i + 4] for i in range(4))
    mean = ((a + c) + (b + d)) / np.float32(x.shape[1])
    r = np.float32(1) / np.sqrt(mean + np.float32(eps))
    normed = (x * r[:, None]) * w
    return np.asarray(normed, np.float32)


@pytest.mark.parametrize("scale", [1.0, 3.7])
@pytest.mark.parametrize("format_", list(Format))
def test_embedding_dequantises_and_scales(make_rig: MakeRig, format_: Format, scale: float) -> None:
    def build(b: ProgramBuilder) -> Buf:
        b.kv(1, 8)
        return b.gather_sampled(b.embedding(b.weight("w", (50, 64)), scale=scale))

    for isa, threads in NATIVE_VARIANTS:
        rig = make_rig(NativeBackend(threads, isa), build, formats={"w": format_})
        rows = [49, 0, 17, 17, 31, 16]
        assert_same_bits(rig.rows(rows), np.float32(scale) * rig.value("w")[rows])


@pytest.mark.parametrize("columns", [8, 576])
def test_rms_norm(make_rig: MakeRig, columns: int) -> None:
    magnitudes = np.array([1e-6, 1e-3, 1, 1, 1, 1, 10, 1e3, 1e15], np.float32)
    x = random_values("x", (9, columns)) * magnitudes[:, None]
    out, rig = run_everywhere(make_rig, lambda b, x: b.rms_norm(x, b.weight("w", (columns,)), eps=1e-5), x)
    w = rig.value("w").reshape(-1)
    assert_same_bits(out, contract_rms_norm(x, w, 1e-5))
    # A sum of K positive terms in lanes: K/8 + 3 roundings, halved by the root; then five more.
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(out, exact, rtol=(columns / 16 + 8) * UNIT)


def test_add_rms_norm_gives_the_norm_and_the_sum(make_rig: MakeRig) -> None:
    x = random_values("x", (9, 64))
    residual = random_values("residual", (9, 64))

    def both(in_place: bool, result: int) -> Emit:
        def emit(b: ProgramBuilder, x: Buf) -> Buf:
            r = b.embedding(b.weight("residual", (9, 64)))
            outs = b.add_rms_norm(x, r, b.weight("w", (64,)), eps=1e-6)
            if not in_place:  # a later reader keeps the residual's bytes
                b.add_rms_norm(x, r, b.weight("w2", (64,)), eps=1e-6)
            return outs[result]

        return emit

    for in_place in (True, False):
        total, rig = run_everywhere(make_rig, both(in_place, 1), x)
        np.testing.assert_array_equal(rig.value("residual"), residual)
        assert_same_bits(total, residual + x)
        normed, rig = run_everywhere(make_rig, both(in_place, 0), x)
        assert_same_bits(normed, contract_rms_norm(residual + x, rig.value("w").reshape(-1), 1e-6))


def test_gated_silu(make_rig: MakeRig) -> None:
    """exp within 3 units, then a sum, a quotient and a product: 8 units. Below -87 exp is clamped, and
    what remains is smaller than any activation."""
    gate = np.concatenate([np.linspace(-120, 120, 400), [0, -0.0, 87, -87, 88, -88, 1e30, -1e30]])
    x = np.stack([np.concatenate([gate, up]) for up in (np.ones(408), np.linspace(-3, 3, 408))]).astype(
        np.float32
    )
    out, _ = run_everywhere(make_rig, lambda b, x: b.gated_activation(x, "silu"), x)
    g, up = x[:, :408].astype(np.float64), x[:, 408:].astype(np.float64)
    with np.errstate(over="ignore"):
        exact = g / (1 + np.exp(-g)) * up
    ordinary = np.abs(g) < 1e6
    np.testing.assert_allclose(out[ordinary], exact[ordinary], rtol=8 * UNIT, atol=1e-34)
    huge = out[:, -2:]
    assert_same_bits(huge[:, 0], x[:, 406] * x[:, -2])  # silu(1e30) is 1e30
    assert (np.abs(huge[:, 1]) <= 1e30 / 6e37 * np.abs(up[:, -1])).all()


def test_a_nan_stays_in_its_row(make_rig: MakeRig) -> None:
    x = random_values("x", (5, 32))
    x[2, 7], x[3, 20] = np.nan, np.inf
    clean = np.nan_to_num(x, posinf=0)

    def emit(b: ProgramBuilder, x: Buf) -> Buf:
        return b.gated_activation(b.rms_norm(x, b.weight("w", (32,)), eps=1e-5), "silu")

    dirty, _ = run_everywhere(make_rig, emit, x)
    expected, _ = run_everywhere(make_rig, emit, clean)
    assert np.isnan(dirty[2]).all()
    assert np.isnan(dirty[3]).any()
    others = [0, 1, 4]
    assert_same_bits(dirty[others], expected[others])


def test_gather_takes_the_rows_asked_for(make_rig: MakeRig) -> None:
    rig = make_rig(NativeBackend(2), rowwise(24, 40, lambda b, x: x))
    first, second = Seq(list(range(10))), Seq(list(range(20, 37)))
    last = rig.step([(first, 10), (second, 17)], "last")
    x = rig.value("x")
    assert_same_bits(last[0], x[9:10])
    assert_same_bits(last[1], x[36:37])
