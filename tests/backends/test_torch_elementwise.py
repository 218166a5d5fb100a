"""exp, norms and activations: accurate, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from octavo.backends.torch.elementwise import EXP_MAX, EXP_MIN, exp, gate, rms_norm, tanh, tree_sum


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it computes, the more so on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ulps(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The error of f32 in units of the last place of the exact float64."""
    unit = torch.from_numpy(np.spacing(exact.float().numpy())).double()
    return ((found.double() - exact) / unit).abs()


def test_exp_is_within_one_ulp() -> None:
    x = torch.cat([torch.linspace(EXP_MIN, EXP_MAX, 400_001), torch.linspace(-1, 1, 100_001)])
    error = ulps(exp(x), torch.exp(x.double()))
    assert error.max() < 1.0


def test_exp_at_the_ends() -> None:
    x = torch.tensor([0.0, -0.0, -87.0, -87.00001, -1e30, -torch.inf, torch.nan, 87.0])
    found = exp(x)
    assert found[:2].tolist() == [1.0, 1.0]
    assert 0 < found[2] < 2e-38
    assert found[3:6].tolist() == [0.0, 0.0, 0.0]
    assert found[6].isnan()
    assert found[7].isfinite()


def test_exp_never_falls() -> None:
    """Over neighbouring floats, where steps are smaller than an ulp of the result, it may only stall."""
    x = torch.from_numpy(np.arange(-8000, 8000, dtype=np.float32) * np.float32(2**-12))
    assert (exp(x).diff() >= 0).all()


@pytest.mark.parametrize("width", [1, 2, 3, 31, 64, 100, 576])
def test_tree_sum(width: int) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    exact = x.double().sum(dim=-1)
    assert ((tree_sum(x) - exact).abs() <= 10 * 2**-24 * x.double().abs().sum(dim=-1)).all()


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": lambda x: exp(-x.abs()),
    "tree_sum": tree_sum,
    "rms_norm": lambda x: rms_norm(x, torch.linspace(0.5, 1.5, x.shape[1]), 1e-5),
    "silu_gate": lambda x: gate(x, "silu"),
    "gelu_gate": lambda x: gate(x, "gelu_tanh"),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("width", [2, 10, 64, 130, 576])
def test_a_row_alone_is_the_row_in_any_batch(name: str, width: int) -> None:
    op = OPS[name]
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(1)) * 4
    alone = torch.stack([op(row[None])[0] for row in x])
    for count in range(1, 41):
        assert torch.equal(op(x[:count]), alone[:count])
    assert torch.equal(op(x[3:]), alone[3:])


def test_a_poisoned_row_keeps_it_to_itself() -> None:
    x = torch.randn(5, 64)
    clean = {name: op(x) for name, op in OPS.items()}
    x[2, 7] = torch.nan
    for name, op in OPS.items():
        found = op(x)
        assert torch.equal(found[[0, 1, 3, 4]], clean[name][[0, 1, 3, 4]])
        assert found[2].isnan().any()


def test_rms_norm_against_float64() -> None:
    x, weight = torch.randn(8, 576) * 3, torch.rand(576) + 0.5
    exact = x.double() / torch.sqrt((x.double() ** 2).mean(dim=1, keepdim=True) + 1e-5) * weight.double()
    # the mean is off by (10 + 2) u, its root by half that; then root, quotient and two products round
    assert ((rms_norm(x, weight, 1e-5) - exact).abs() <= (6 + 5) * 2**-24 * exact.abs()).all()


def test_silu_gate_against_float64() -> None:
    x = torch.cat([torch.randn(20, 64) * 4, torch.linspace(-200, 200, 64).repeat(2, 1)])
    gated, up = x.double().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gated) * up
    error = (gate(x, "silu") - exact).abs()
    assert (error <= 6 * 2**-24 * exact.abs() + 1e-30).all()


def test_gelu_gate_against_float64() -> None:
    """Where 1 + tanh cancels the error is a few units of the argument's own size."""
    x = torch.cat([torch.randn(20, 64) * 4, torch.linspace(-30, 30, 64).repeat(2, 1)])
    gated, up = x.double().chunk(2, dim=1)
    exact = torch.nn.functional.gelu(gated, approximate="tanh") * up
    error = (gate(x, "gelu_tanh") - exact).abs()
    assert (error <= 8 * 2**-24 * (gated * up).abs() + 1e-30).all()


def test_tanh_against_float64() -> None:
    x = torch.cat([torch.linspace(-12, 12, 999), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-8])])
    error = (tanh(x) - torch.tanh(x.double())).abs()
    assert (error <= 4 * 2**-24).all()
    assert tanh(torch.tensor([torch.nan])).isnan().all()
