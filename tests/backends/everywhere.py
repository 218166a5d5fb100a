"""An op of the native backend on rows: by every build, with more and fewer threads, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import NATIVE_VARIANTS, F32Array, Rig, assert_same_bits, rowwise, stored

from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf

MakeRig = Callable[..., Rig]
Emit = Callable[[ProgramBuilder, Buf], Buf]


def run_everywhere(make_rig: MakeRig, emit: Emit, x: F32Array, **options: Any) -> tuple[F32Array, Rig]:
    """An op's output for the rows of x, after checking that every build and thread count agrees, and
    each row alone with all together."""
    build = rowwise(x.shape[1], len(x), emit)
    options["weights"] = {**options.get("weights", {}), "x": stored(x)}
    outs, rigs = [], []
    for isa, threads in NATIVE_VARIANTS:
        rigs.append(make_rig(NativeBackend(threads, isa), build, **options))
        outs.append(rigs[-1].rows(range(len(x))))
        assert_same_bits(outs[-1], outs[0], f"{isa}, {threads} threads")
    for row in range(len(x)):
        assert_same_bits(rigs[-1].rows([row]), outs[0][row : row + 1], f"row {row} alone")
    return outs[0], rigs[-1]


def on_torch(make_rig: MakeRig, emit: Emit, x: F32Array, **options: Any) -> F32Array:
    """The same program's output on the torch backend, which has the same contract."""
    options["weights"] = {**options.get("weights", {}), "x": stored(x)}
    rig = make_rig(TorchBackend(num_threads=1), rowwise(x.shape[1], len(x), emit), **options)
    return rig.rows(range(len(x)))
