"""linear on the native backend: the contract's arithmetic to the bit, for every batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness import (
    NATIVE_ISAS,
    NATIVE_VARIANTS,
    UNIT,
    F32Array,
    Rig,
    Rows,
    assert_same_bits,
    bits,
    fma,
    random_values,
    rowwise,
    stored,
)

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.errors import ConfigError, UnsupportedModelError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf
from octavo.program.planner import Limits
from octavo.quantization.formats import GROUP, Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

MakeRig = Callable[..., Rig]
FORMATS = list(Format)
#: Formats, each with the bits of the activations it meets, and their largest integers.
KINDS = [*((format_, 16) for format_ in FORMATS), (Format.Q4, 8), (Format.Q4M, 8)]
LARGEST_QUANT = {
    **{(format_, bits): (1 << bits - 1) - 1 for format_ in (Format.Q4, Format.Q4M) for bits in (8, 16)},
    **{(format_, 16): 4095 for format_ in (Format.Q8, Format.Q8G16)},
}
SCALE_BYTES = {Format.Q4: 2, Format.Q4M: 4, Format.Q8: 2, Format.Q8G16: 4}
MAX_ROWS = 67


def linear(
    columns: int, outputs: int, *, bias: bool = False, rows: int = MAX_ROWS
) -> Callable[[ProgramBuilder], Buf]:
    """x [T, columns] -> [T, outputs]."""

    def emit(b: ProgramBuilder, x: Buf) -> Buf:
        b_ = b.weight("bias", (outputs,)) if bias else None
        return b.linear(x, b.weight("w", (outputs, columns)), bias=b_)

    return rowwise(columns, rows, emit)


def quantise(x: F32Array, largest: int) -> tuple[F32Array, F32Array, F32Array]:
    """The contract's activations: integers [M, G, 32], scales and scale * sum [M, G]."""
    groups = x.reshape(len(x), -1, GROUP)
    top = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.float32(largest) / top
        quants = np.rint(groups * inverse[:, :, None])
    quants[top == 0] = 0
    scales = top / np.float32(largest)
    return quants, scales, scales * quants.sum(axis=2, dtype=np.float32)


def contract(x: F32Array, weight: Rows, format_: Format, activation_bits: int = 16) -> F32Array:
    """Linear as program/ir.py spells it, operation by operation."""
    if not format_.quantized:
        w = weight.dequantize()
        acc = np.zeros((len(x), len(w)), np.float32)
        for k in range(x.shape[1]):
            acc = fma(w[None, :, k], x[:, k, None], acc)
        return acc
    block = weight.raw.reshape(len(weight.raw), -1, format_.group_nbytes)
    head = block[:, :, : SCALE_BYTES[format_]].copy().view(np.float16).astype(np.float32)
    w_quants = block[:, :, SCALE_BYTES[format_] :]
    if format_.is_4_bit:
        w_quants = np.concatenate([w_quants & 15, w_quants >> 4], axis=2).astype(np.int64)
        w_quants -= 8 if format_ is Format.Q4 else 0
    else:
        w_quants = w_quants.view(np.int8).astype(np.int64)
    quants, scales, sums = quantise(x, LARGEST_QUANT[format_, activation_bits])
    parts = 2 if format_ is Format.Q8G16 else 1
    acc = np.zeros((len(x), len(block)), np.float32)
    for g in range(block.shape[1]):
        for part in range(parts):
            span = slice(part * GROUP // parts, (part + 1) * GROUP // parts)
            dot = quants[:, g, span].astype(np.int64) @ w_quants[:, g, span].T
            assert np.abs(dot).max() < 2**24
            acc = fma(dot.astype(np.float32), head[None, :, g, part] * scales[:, g, None], acc)
        if format_ is Format.Q4M:
            acc = fma(head[None, :, g, 1], sums[:, g, None], acc)
    return acc


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_build_computes_the_contract_bit_for_bit(
    make_rig: MakeRig, format_: Format, activation_bits: int, bias: bool
) -> None:
    x = random_values("x", (9, 96))
    x[3] *= 1e-3  # rows of other magnitudes, a group of zeros, and what quantises to the ends
    x[4, 32:64] = 0
    x[5, :32] = np.where(np.arange(32) % 2, -7.5, 7.5)
    x[6] = -x[6, 0]
    weight = stored(random_values("w", (37, 96)), format_)
    if format_.quantized:  # the largest integers there are: 15s, -8s, -128s, with row 6 the largest sums
        block = weight.raw[8].reshape(-1, format_.group_nbytes)
        largest = {Format.Q4: 0x00, Format.Q4M: 0xFF}
        block[:, SCALE_BYTES[format_] :] = largest.get(format_, 0x80)
    expected = contract(x, weight, format_, activation_bits)
    for isa, threads in NATIVE_VARIANTS:
        rig = make_rig(
            NativeBackend(threads, isa),
            linear(96, 37, bias=bias, rows=9),
            weights={"x": stored(x), "w": weight},
            formats={"w": format_},
            activation_bits=activation_bits,
        )
        wanted = expected + rig.value("bias")[:, 0] if bias else expected
        assert_same_bits(rig.rows(range(9)), wanted, f"{isa}, {threads} threads")


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
def test_close_to_float64(make_rig: MakeRig, format_: Format, activation_bits: int) -> None:
    """f32: K roundings of partial sums, each at most UNIT of sum |w x|. Quantised activations add at
    most half a step, max|x| / largest, for each product."""
    columns = 96
    rig = make_rig(
        NativeBackend(2), linear(columns, 40), formats={"w": format_}, activation_bits=activation_bits
    )
    x, w = rig.value("x").astype(np.float64), rig.value("w").astype(np.float64)
    bound = (columns + 3) * UNIT * np.abs(x) @ np.abs(w).T
    if format_.quantized:
        steps = np.abs(x).reshape(len(x), -1, GROUP).max(axis=2) / LARGEST_QUANT[format_, activation_bits]
        weights = np.abs(w).reshape(len(w), -1, GROUP).sum(axis=2)
        bound = bound + 0.501 * steps @ weights.T
    assert (np.abs(rig.rows(range(MAX_ROWS)) - x @ w.T) <= bound).all()


@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if not format_.quantized])
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_plain_weights_have_any_width(make_rig: MakeRig, isa: str, format_: Format) -> None:
    def build(b: ProgramBuilder) -> Buf:
        b.kv(1, 8)
        x = b.linear(b.embedding(b.weight("x", (5, 16))), b.weight("narrow", (7, 16)))
        return b.gather_sampled(b.linear(x, b.weight("w", (3, 7))))

    rig = make_rig(NativeBackend(1, isa), build, formats={"narrow": format_, "w": format_})
    narrow = contract(rig.value("x"), rig.parts["narrow"][0], format_)
    assert_same_bits(rig.rows(range(5)), contract(narrow, rig.parts["w"][0], format_))


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
def test_a_row_alone_equals_itself_in_every_batch(
    make_rig: MakeRig, format_: Format, activation_bits: int
) -> None:
    rig = make_rig(NativeBackend(2), linear(160, 50), formats={"w": format_}, activation_bits=activation_bits)
    whole = rig.rows(range(MAX_ROWS))
    for rows in range(1, MAX_ROWS):
        assert_same_bits(rig.rows(range(rows)), whole[:rows], f"{rows} rows")
        assert_same_bits(rig.rows([rows]), whole[rows : rows + 1], f"row {rows} alone")
    order = list(np.random.default_rng(0).permutation(MAX_ROWS))
    assert_same_bits(rig.rows(order), whole[order], "shuffled")


@pytest.mark.parametrize(("format_", "activation_bits"), KINDS)
def test_many_rows_and_panels_take_every_path(
    make_rig: MakeRig, format_: Format, activation_bits: int
) -> None:
    """Blocks of rows, chunks of panels, unpacking: 300 rows of 4096 columns do not fit one block."""
    limits = Limits(max_tokens=300, max_seqs=1, max_sampled=300, max_model_len=304)
    rig = make_rig(
        NativeBackend(2),
        linear(4096, 530, rows=300),
        formats={"w": format_},
        activation_bits=activation_bits,
        limits=limits,
    )
    whole = rig.rows(range(300))
    for rows in ([0], [299], [7, 8, 120], list(range(40, 60))):
        assert_same_bits(rig.rows(rows), whole[rows])


@pytest.mark.parametrize(("format_", "activation_bits"), [kind for kind in KINDS if kind[0].quantized])
def test_what_is_not_finite_stays_in_its_row_and_shows(
    make_rig: MakeRig, format_: Format, activation_bits: int
) -> None:
    x = random_values("x", (6, 64))
    clean = x.copy()
    x[1, 5], x[2, 40], x[3, 0] = np.nan, np.inf, -np.inf
    x[4] *= 1e-38  # below what the quantiser resolves: zeros, not infinities
    outs = []
    for isa in NATIVE_ISAS:
        rigs = [
            make_rig(
                NativeBackend(1, isa),
                linear(64, 20, rows=6),
                weights={"x": stored(v)},
                formats={"w": format_},
                activation_bits=activation_bits,
            )
            for v in (x, clean)
        ]
        dirty, untouched = (rig.rows(range(6)) for rig in rigs)
        assert np.isnan(dirty[1:4]).all()
        assert_same_bits(dirty[[0, 5]], untouched[[0, 5]])
        assert (np.abs(dirty[4]) < 1e-36).all()
        outs.append(dirty)
    assert_same_bits(outs[0], outs[1])


# -- packing ------------------------------------------------------------------------------------


def lookup(columns: int, rows: int) -> Callable[[ProgramBuilder], Buf]:
    """The rows of a weight, as an embedding reads them."""

    def build(b: ProgramBuilder) -> Buf:
        b.kv(1, 8)
        return b.gather_sampled(b.embedding(b.weight("w", (rows, columns))))

    return build


@pytest.mark.parametrize("format_", FORMATS)
def test_packing_loses_nothing(make_rig: MakeRig, format_: Format) -> None:
    """Parts that begin inside a panel, one of them reordered, come back bit for bit."""
    values = random_values("w", (45, 64))
    order = np.random.default_rng(1).permutation(21).astype(np.int32)
    parts = [
        stored(values[:5], format_),
        stored(values[5:26], format_, row_order=order),
        stored(values[26:], format_),
    ]
    for isa in NATIVE_ISAS:
        rig = make_rig(NativeBackend(2, isa), lookup(64, 45), weights={"w": parts}, formats={"w": format_})
        expected = np.concatenate([part.dequantize() for part in parts])
        assert_same_bits(rig.rows(range(45)), expected)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_large_weight_is_packed_by_the_team(make_rig: MakeRig, format_: Format) -> None:
    rows = (5 << 20) // (256 // GROUP * format_.group_nbytes) + 3
    weight = stored(random_values("w", (rows, 256)), format_)
    rig = make_rig(NativeBackend(3), lookup(256, rows), weights={"w": weight}, formats={"w": format_})
    sample = [0, 1, 15, 16, 17, rows // 2, rows - 4, rows - 1]
    assert_same_bits(rig.rows(sample), weight.dequantize()[sample])


def test_quantised_rows_become_f32_where_the_weight_is_f32(make_rig: MakeRig) -> None:
    weight = stored(
        random_values("w", (20, 64)), Format.Q8, row_order=np.arange(20, dtype=np.int32)[::-1].copy()
    )
    rig = make_rig(NativeBackend(1), lookup(64, 20), weights={"w": weight})
    assert_same_bits(rig.rows(range(20)), weight.dequantize())


def test_padding_is_zeroed(make_rig: MakeRig) -> None:
    """The last panel's rows that do not exist multiply as zeros: what was in the memory may be NaN."""
    rig = make_rig(NativeBackend(1), linear(32, 17), formats={"w": Format.Q4M})
    weight = next(w for w in rig.program.weights if w.name == "w")
    begin = rig.sealed.weight_offsets[weight.id]
    panels = rig.memory.weights[begin : begin + rig.backend.table.weight_nbytes(weight)].numpy()
    assert (panels[320:].reshape(-1)[256:].view(np.float16)[1:16] == 0).all()


def test_parts_that_do_not_fit_are_refused(make_rig: MakeRig) -> None:
    with pytest.raises(UnsupportedModelError, match="weights of type Q8_0 can't be held as q4m"):
        make_rig(
            NativeBackend(1),
            lookup(64, 20),
            weights={"w": stored(random_values("w", (20, 64)), Format.Q8)},
            formats={"w": Format.Q4M},
        )
    for rows in (19, 21):
        with pytest.raises(ConfigError, match=f"'w' has 20 rows, but its parts have {rows}"):
            make_rig(NativeBackend(1), lookup(64, 20), weights={"w": stored(random_values("w", (rows, 64)))})


def test_harness_tells_bits_apart() -> None:
    zeros = np.array([0.0, -0.0, np.nan, -np.nan], np.float32)
    assert bits(zeros)[0] != bits(zeros)[1]
    assert bits(zeros)[2] == bits(zeros)[3]
