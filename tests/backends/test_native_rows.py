"""Embedding, sums, norms, gated activations, scaled logits and gather on the native backend."""

from __future__ import annotations

import numpy as np
import pytest
from everywhere import Emit, MakeRig, on_torch, run_everywhere
from harness import NATIVE_VARIANTS, UNIT, F32Array, Seq, assert_same_bits, fma, random_values, rowwise

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import ACTIVATIONS, Buf
from octavo.quantization.formats import Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")


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


@pytest.mark.parametrize("x_scale", [None, 0.22])
def test_add(make_rig: MakeRig, x_scale: float | None) -> None:
    x, residual = random_values("x", (9, 64)), random_values("residual", (9, 64))

    def added(in_place: bool) -> Emit:
        def emit(b: ProgramBuilder, x: Buf) -> Buf:
            r = b.embedding(b.weight("residual", (9, 64)))
            out = b.add(x, r, x_scale=x_scale)
            return out if in_place else b.add(out, r)  # a later reader keeps the residual's bytes

        return emit

    total = residual + (x if x_scale is None else np.float32(x_scale) * x)
    assert_same_bits(run_everywhere(make_rig, added(True), x)[0], total)
    assert_same_bits(run_everywhere(make_rig, added(False), x)[0], residual + total)
    assert_same_bits(on_torch(make_rig, added(True), x), total)


@pytest.mark.parametrize("x_scale", [None, 0.22])
def test_add_rms_norm_gives_the_norm_and_the_sum(make_rig: MakeRig, x_scale: float | None) -> None:
    x = random_values("x", (9, 64))
    residual = random_values("residual", (9, 64))
    scaled = x if x_scale is None else np.float32(x_scale) * x

    def both(in_place: bool, result: int) -> Emit:
        def emit(b: ProgramBuilder, x: Buf) -> Buf:
            r = b.embedding(b.weight("residual", (9, 64)))
            outs = b.add_rms_norm(x, r, b.weight("w", (64,)), eps=1e-6, x_scale=x_scale)
            if not in_place:  # a later reader keeps the residual's bytes
                b.add_rms_norm(x, r, b.weight("w2", (64,)), eps=1e-6)
            return outs[result]

        return emit

    for in_place in (True, False):
        total, rig = run_everywhere(make_rig, both(in_place, 1), x)
        np.testing.assert_array_equal(rig.value("residual"), residual)
        assert_same_bits(total, residual + scaled)
        normed, rig = run_everywhere(make_rig, both(in_place, 0), x)
        assert_same_bits(normed, contract_rms_norm(residual + scaled, rig.value("w").reshape(-1), 1e-6))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(4, 2, 24), (9, 1, 8), (1, 1, 64)])
def test_qk_norm(make_rig: MakeRig, q_heads: int, kv_heads: int, dim: int, together: bool) -> None:
    width = (q_heads + 2 * kv_heads) * dim
    sizes = [(heads * dim if together else dim,) for heads in (q_heads, kv_heads)]

    def emit(b: ProgramBuilder, x: Buf) -> Buf:
        q_weight, k_weight = (b.weight(name, size) for name, size in zip("qk", sizes, strict=True))
        return b.qk_norm(x, q_weight, k_weight, q_heads=q_heads, kv_heads=kv_heads, eps=1e-6)

    x = random_values("x", (7, width)) * np.logspace(-3, 3, 7, dtype=np.float32)[:, None]
    out, rig = run_everywhere(make_rig, emit, x)
    begin = 0
    for name, heads, (size,) in zip("qk", (q_heads, kv_heads), sizes, strict=True):
        end = begin + heads * dim
        rows = contract_rms_norm(x[:, begin:end].reshape(-1, size), rig.value(name).reshape(-1), 1e-6)
        assert_same_bits(out[:, begin:end], rows.reshape(7, -1), name)
        begin = end
    assert_same_bits(out[:, begin:], x[:, begin:], "v")
    np.testing.assert_allclose(out, on_torch(make_rig, emit, x), rtol=(width / 16 + 20) * UNIT)


@pytest.mark.parametrize("width", [131, 128, 5])
@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (1.0, 30.0), (3.0, 10.0)])
def test_scale_logits(make_rig: MakeRig, width: int, scale: float, softcap: float | None) -> None:
    """A vocabulary need not be a multiple of eight."""

    def emit(b: ProgramBuilder, x: Buf) -> Buf:
        logits = b.linear(x, b.weight("head", (width, 16)))
        return b.scale_logits(logits, scale=scale, softcap=softcap)

    x = random_values("x", (9, 16)) * 20
    out, rig = run_everywhere(make_rig, emit, x)
    logits = np.zeros((9, width), np.float32)
    for k in range(16):
        logits = fma(rig.value("head")[None, :, k], x[:, k, None], logits)
    scaled = np.float32(scale) * logits
    if softcap is None:
        assert_same_bits(out, scaled)
        return
    exact = softcap * np.tanh(scaled.astype(np.float64) / softcap)
    np.testing.assert_allclose(out, exact, rtol=2 * UNIT, atol=softcap * 5 * UNIT)
    np.testing.assert_allclose(out, on_torch(make_rig, emit, x), atol=200 * UNIT * np.abs(logits).max())


def gate_rows(low: float, high: float) -> F32Array:
    """[3, 2 * 408]: gates over a range and beyond, with ups of one, of either sign and of all sizes."""
    gate = np.concatenate([np.linspace(low, high, 400), [0, -0.0, 87, -87, 7, 7.000001, 1e30, -1e30]])
    ups = (np.ones(408), np.linspace(-3, 3, 408), np.linspace(-20, 20, 408))
    return np.stack([np.concatenate([gate, up]) for up in ups]).astype(np.float32)


def exact_gate(x: F32Array, activation: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 results, and what their errors are relative to."""
    g, up = np.split(x.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        if activation == "silu":
            exact = g / (1 + np.exp(-g)) * up
            return exact, np.abs(exact)
        if activation == "gelu_tanh":  # where 1 + tanh cancels, the error is one of g itself
            return 0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) * up, np.abs(g * up)
        g, up = np.minimum(g, 7), np.clip(up, -7, 7)
        exact = (up + 1) * g / (1 + np.exp(-1.702 * g))
        # up + 1 cancels near -1; an exponent of n rounds by n units
        return exact, np.abs(exact) * (1 + np.abs(g)) + np.abs(g) / 8


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(make_rig: MakeRig, activation: str) -> None:
    x = gate_rows(-120, 120)

    def emit(b: ProgramBuilder, x: Buf) -> Buf:
        return b.gated_activation(x, activation)

    out, _ = run_everywhere(make_rig, emit, x)
    exact, size = exact_gate(x, activation)
    ordinary = np.abs(x[:, :408]) < 1e6
    assert (np.abs(out - exact) <= 10 * UNIT * size + 1e-34)[ordinary].all()
    on_torch_ = on_torch(make_rig, emit, x)
    assert (np.abs(out - on_torch_) <= 20 * UNIT * size + 1e-34)[ordinary].all()
    np.testing.assert_allclose(out[~ordinary], on_torch_[~ordinary], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("column", [3, 8 + 3])
def test_a_gate_lets_a_nan_through(make_rig: MakeRig, activation: str, column: int) -> None:
    x = random_values("x", (3, 16))
    x[1, column] = np.nan
    out, _ = run_everywhere(make_rig, lambda b, x: b.gated_activation(x, activation), x)
    assert (np.isnan(out) == (np.indices(out.shape) == [[[1]], [[3]]]).all(axis=0)).all()


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
