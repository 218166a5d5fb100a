"""Handles refuse to compute: whatever a model file tries fails while it is built, with a reason."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ProgramError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import KV, Buf, Dim, DType, Program, RopeTable, Shard, Weight
from octavo.quantization.formats import Format

X = Buf(0, DType.F32, (Dim.TOKENS, 64))
Y = Buf(1, DType.F32, (Dim.TOKENS, 64))
W = Weight(0, "w", (64, 64), Format.F32, ("w",), Shard.REPLICATED)
HANDLES = [X, W, RopeTable(0, 16, (1.0, 0.5)), KV(0, 2, 16, DType.F32)]

BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"]
BINARY += ["lshift", "rshift", "lt", "le", "gt", "ge", "iadd", "imul", "contains"]
UNARY = ["neg", "pos", "invert", "abs", "truth", "index"]

CALLS: dict[str, Callable[[Any], Any]] = {
    "divmod": lambda x: divmod(x, 2),
    "reflected divmod": lambda x: divmod(2, x),
    "round": round,
    "float": float,
    "int": int,
    "complex": complex,
    "len": len,
    "list": list,
    "sum": lambda x: sum([x, x]),
    "max": lambda x: max(x, x),
    "if": lambda x: 1 if x else 2,
    "and": lambda x: x and 1,
    "index": lambda x: x[0],
    "slice": lambda x: x[:, 1:],
    "assignment": lambda x: operator.setitem(x, 0, 1),
    "call": lambda x: x(1),
    "as an index": lambda x: [1, 2][x],
    "math.sqrt": math.sqrt,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
}

ONES = torch.ones(3)
TORCH: dict[str, Callable[[Any], Any]] = {
    "exp": torch.exp,
    "on the right of a tensor": lambda x: ONES + x,
    "on the left of a tensor": lambda x: x * ONES,
    "tensor ==": lambda x: torch.eq(ONES, x),
    "tensor //": lambda x: ONES // x,
    "cat of a list": lambda x: torch.cat([x, x]),
    "stack of a tuple": lambda x: torch.stack((ONES, x)),
    "block_diag": lambda x: torch.block_diag(ONES, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "where": lambda x: torch.where(ONES > 0, x, ONES),
    "keyword": lambda x: torch.add(ONES, other=x),
    "out": lambda x: torch.add(ONES, ONES, out=x),
    "tensor": torch.tensor,
    "as_tensor of a list": lambda x: torch.as_tensor([x]),
    "assigned to a tensor": lambda x: operator.setitem(ONES.clone(), 0, x),
    "linear": lambda x: torch.nn.functional.linear(x, ONES),
    "silu": torch.nn.functional.silu,
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    "module": torch.nn.Linear(3, 3),
}
NUMPY: dict[str, Callable[[Any], Any]] = {
    "array": np.array,
    "array of a list": lambda x: np.array([x, x]),
    "exp": np.exp,
    "sum": np.sum,
    "mean": np.mean,
    "dot": lambda x: np.dot(np.ones(3), x),
    "concatenate": lambda x: np.concatenate([x, x]),
    "reshape": lambda x: np.reshape(x, (2, 2)),
    "right of an array": lambda x: np.ones(3) + x,
    "right of a scalar": lambda x: np.float32(2) * x,
    "array @": lambda x: np.ones(3) @ x,
    "array ==": lambda x: np.ones(3) == x,
}


@pytest.mark.parametrize("handle", HANDLES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_every_binary_operator_is_refused(name: str, handle: Any) -> None:
    apply = getattr(operator, name)
    with pytest.raises(ProgramError, match=r"a model file builds a program and computes nothing"):
        apply(handle, 2)
    with pytest.raises(ProgramError, match=r"Emit an op of the ProgramBuilder"):
        apply(handle, Y)


@pytest.mark.parametrize("name", [n for n in BINARY if n not in ("iadd", "imul", "contains")])
def test_reflected_operators_are_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"was applied to %0, but a model file builds a program"):
        getattr(operator, name)(2, X)


@pytest.mark.parametrize("name", UNARY)
def test_every_unary_operator_is_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"was applied to %0"):
        getattr(operator, name)(X)


@pytest.mark.parametrize("name", CALLS)
def test_builtins_are_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"handles have no data"):
        CALLS[name](X)


@pytest.mark.parametrize("name", TORCH)
def test_torch_functions_are_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"was applied to %0, but a model file builds a program"):
        TORCH[name](X)


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_functions_are_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"a numpy operation was applied to %0"):
        NUMPY[name](X)


@pytest.mark.parametrize("name", ["view", "reshape", "T", "float", "softmax", "sum", "device", "size"])
def test_methods_of_tensors_are_attribute_errors(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"%0 has no attribute '{name}': a model file builds"):
        getattr(X, name)


def test_the_message_names_the_function_and_the_handle() -> None:
    with pytest.raises(ProgramError, match=r"^torch\.softmax was applied to %1, "):
        torch.softmax(Y, dim=-1)
    with pytest.raises(ProgramError, match=r"^the operator '@' was applied to %0, "):
        X @ W
    with pytest.raises(ProgramError, match=r"^torch\.cat was applied to @w, "):
        torch.cat([ONES, W])


def test_a_model_file_that_uses_a_torch_op_fails_at_build() -> None:
    def build(b: ProgramBuilder) -> Program:
        embed = b.weight("embed", (32, 64))
        x = b.embedding(embed)
        x = torch.nn.functional.gelu(x)
        return b.build(b.linear(b.gather_sampled(x), embed))

    b = ProgramBuilder("bad", format_of=lambda parts: Format.F32, kv_dtype=DType.F32)
    with pytest.raises(ProgramError, match=r"torch\.gelu was applied to %0, .* Emit an op of the Program"):
        build(b)


def test_handles_are_values() -> None:
    """They are keys of dictionaries, and survive a copy."""
    assert Buf(0, DType.F32, (Dim.TOKENS, 64)) == X
    assert X != Y
    assert len({X, Y, X}) == 2
    for handle in HANDLES:
        assert copy.deepcopy(handle) == handle
        assert pickle.loads(pickle.dumps(handle)) == handle
    with pytest.raises(AttributeError):
        X.id = 3  # type: ignore[misc]
