"""Linear layers of the torch backend: rows that don't know each other, and the contract's integers."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.torch.linear import QuantizedWeight, _fma, linear
from octavo.quantization.formats import GROUP, Format

F32Array = npt.NDArray[np.float32]
#: Formats, each with the largest integers that its activations become.
KINDS = [
    *((format_, top) for format_ in (Format.Q4, Format.Q4M) for top in (32767, 127)),
    *((format_, 4095) for format_ in (Format.Q8, Format.Q8G16)),
]
#: The integers that scales multiply.
RANGES = {Format.Q4: (-8, 8), Format.Q4M: (0, 16), Format.Q8: (-128, 128), Format.Q8G16: (-128, 128)}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it computes, the more so on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(format_: Format, n: int, k: int) -> QuantizedWeight:
    rng = np.random.default_rng(n * k)
    parts = k // GROUP * (2 if format_ is Format.Q8G16 else 1)

    def halves() -> torch.Tensor:
        values = rng.normal(0, 0.1, (n, parts)).astype(np.float16).astype(np.float32)
        return torch.from_numpy(values)

    q = torch.from_numpy(rng.integers(*RANGES[format_], (n, k)).astype(np.int8))
    return QuantizedWeight(format_, q, halves(), halves() if format_ is Format.Q4M else None)


def apply(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, top: int = 4095) -> torch.Tensor:
    rows = weight.q.shape[0] if isinstance(weight, QuantizedWeight) else weight.shape[0]
    out = torch.full((x.shape[0], rows), torch.nan)
    linear(x, weight, out, top)
    return out


# -- rows -----------------------------------------------------------------------------------------

WEIGHTS = {
    "f32 64 -> 128": random((128, 64)),
    "f32 64 -> 259": random((259, 64)),
    "f32 40 -> 3": random((3, 40)),
    "f32 576 -> 960": random((960, 576)),
    "f32 1536 -> 576": random((576, 1536)),
    "q4 64 -> 21": random_weight(Format.Q4, 21, 64),
    "q8g16 64 -> 19": random_weight(Format.Q8G16, 19, 64),
    "q4m 64 -> 37": random_weight(Format.Q4M, 37, 64),
    "q8 96 -> 48": random_weight(Format.Q8, 48, 96),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_alone_is_the_row_in_any_batch(name: str) -> None:
    weight = WEIGHTS[name]
    k = weight.q.shape[1] if isinstance(weight, QuantizedWeight) else weight.shape[1]
    x = random((40, k), seed=1)
    alone = torch.cat([apply(row[None], weight) for row in x])
    for count in range(1, 41):
        assert torch.equal(apply(x[:count], weight), alone[:count])
    for start in (1, 5, 15, 16, 17):
        assert torch.equal(apply(x[start:], weight), alone[start:])


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_keeps_it_to_itself(name: str, poison: float) -> None:
    weight = WEIGHTS[name]
    k = weight.q.shape[1] if isinstance(weight, QuantizedWeight) else weight.shape[1]
    x = random((20, k), seed=1)
    clean = apply(x, weight)
    x[7, 3] = poison
    found = apply(x, weight)
    others = [i for i in range(20) if i != 7]
    assert torch.equal(found[others], clean[others])
    assert not found[7].isfinite().any()


@pytest.mark.parametrize("name", ["f32 64 -> 128", "f32 576 -> 960"])
def test_threads_do_not_change_a_bit(name: str) -> None:
    x = random((40, WEIGHTS[name].shape[1]), seed=1)  # type: ignore[union-attr]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(apply(x, WEIGHTS[name]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_dense_against_float64() -> None:
    weight, x = random((128, 576)), random((30, 576), seed=1)
    exact = x.double() @ weight.double().T
    bound = 578 * 2**-24 * (x.double().abs() @ weight.double().abs().T)
    assert ((apply(x, weight) - exact).abs() <= bound).all()


# -- fma ------------------------------------------------------------------------------------------


def round_to_f32(value: Fraction) -> np.float32:
    """To nearest, ties to even, of a value in the normal range."""
    if value == 0:
        return np.float32(0)
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while abs(value) < Fraction(2) ** (exponent + 23):
        exponent -= 1
    return np.float32(float(round(value / Fraction(2) ** exponent)) * 2.0**exponent)


def fma(a: float, b: float, c: float) -> np.float32:
    return round_to_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))


FLOATS = st.floats(-(2.0**20), 2.0**20, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-20)


@given(FLOATS, FLOATS, FLOATS)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    found = _fma(*(torch.tensor([v]) for v in (a, b, c)))
    assert found.item() == fma(a, b, c)


def test_fma_where_rounding_twice_would_differ() -> None:
    """(1 + 2**-12)**2 = 1 + 2**-11 + 2**-24 is a tie in f32. What breaks it, 2**-60, would be lost if the
    sum were rounded to float64 first."""
    x = torch.tensor([1 + 2.0**-12] * 2)
    c = torch.tensor([2.0**-60, -(2.0**-60)])
    assert _fma(x, x, c).tolist() == [1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-11]
    assert _fma(-x, x, -c).tolist() == [-(1 + 2.0**-11 + 2.0**-23), -(1 + 2.0**-11)]


def test_fma_of_no_numbers() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38])
    found = _fma(values, torch.full((5,), 2.0), torch.ones(5))
    assert found[0].isnan()
    assert found[1:].tolist() == [np.inf, -np.inf, np.inf, -np.inf]


# -- the contract, in integers --------------------------------------------------------------------


def model(x: F32Array, weight: QuantizedWeight, largest: int) -> F32Array:
    """ir.Linear's docstring, one output at a time, in numpy's f32 and exact fractions."""
    top = np.float32(largest)
    q, d = weight.q.numpy().astype(np.int64), weight.d.numpy()
    m = None if weight.m is None else weight.m.numpy()
    n, k = q.shape
    per_group = d.shape[1] * GROUP // k
    out = np.empty((len(x), n), np.float32)
    for r, row in enumerate(x):
        for o in range(n):
            acc = np.float32(0)
            for g in range(k // GROUP):
                span = slice(g * GROUP, (g + 1) * GROUP)
                peak = np.abs(row[span]).max()
                with np.errstate(divide="ignore", over="ignore"):
                    inverse = top / peak
                if np.isinf(inverse):
                    scale, ints = np.float32(0), np.zeros(GROUP, np.int64)
                else:
                    scale, ints = peak / top, np.rint(row[span] * inverse).astype(np.int64)
                assert np.abs(ints).max() <= top
                for part, products in enumerate((q[o, span] * ints).reshape(per_group, -1)):
                    dot = int(products.sum())
                    assert abs(dot) < 2**24
                    acc = fma(float(dot), d[o, g * per_group + part] * scale, acc)
                if m is not None:
                    acc = fma(m[o, g], scale * np.float32(ints.sum()), acc)
            out[r, o] = acc
    return out


@pytest.mark.parametrize(("format_", "top"), KINDS)
def test_quantised_arithmetic_is_the_contract_bit_for_bit(format_: Format, top: int) -> None:
    weight = random_weight(format_, 12, 96)
    x = random((9, 96), seed=3).numpy() * 5
    x[1, 32:64] = 0  # a group of zeros
    x[2] = np.round(x[2])
    x[3] *= 1e-10
    x[4] = 1.0
    x[5, :32] = 4095 * np.sign(x[5, :32])
    assert np.array_equal(apply(torch.from_numpy(x), weight, top).numpy(), model(x, weight, top))


@pytest.mark.parametrize(("format_", "top"), KINDS)
def test_the_largest_sums_are_exact(format_: Format, top: int) -> None:
    weight = random_weight(format_, 4, 64)
    weight.q.fill_(15 if format_ is Format.Q4M else RANGES[format_][0])
    x = np.full((2, 64), 3.0, np.float32)
    x[1] *= -1
    assert np.array_equal(apply(torch.from_numpy(x), weight, top).numpy(), model(x, weight, top))


@pytest.mark.parametrize(("format_", "top"), KINDS)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, 2e-37])
def test_a_group_too_small_to_scale_counts_as_zeros(format_: Format, top: int, tiny: float) -> None:
    """127 / 1e-38 is infinite; infinity times 0 would make the row NaN."""
    weight = random_weight(format_, 8, 64)
    x = random((1, 64), seed=4).numpy()
    x[0, :32] = 0
    x[0, 5] = tiny
    found = apply(torch.from_numpy(x), weight, top).numpy()
    assert np.array_equal(found, model(x, weight, top))
    x[0, 5] = 0
    assert np.array_equal(found, model(x, weight, top))


@pytest.mark.parametrize(("format_", "top"), KINDS)
def test_quantised_arithmetic_is_close_to_the_product(format_: Format, top: int) -> None:
    """Off by half a step of the activations at most, plus rounding."""
    weight = random_weight(format_, 24, 128)
    x = random((10, 128), seed=5)
    w = weight.q.double().view(*weight.d.shape, -1) * weight.d.double()[:, :, None]
    w = w.view(24, 4, GROUP)
    if weight.m is not None:
        w = w + weight.m.double()[:, :, None]
    exact = x.double() @ w.view(24, 128).T
    step = x.view(10, 4, GROUP).abs().amax(dim=2).double() / top
    bound = (step[:, None, :] * w.abs().sum(dim=2)[None]).sum(dim=2) / 2
    assert ((apply(x, weight, top) - exact).abs() <= 1.001 * bound + 1e-4).all()
