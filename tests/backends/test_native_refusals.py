"""Programs that the library refuses to bind, whatever the table says: what kernels take for granted is
checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from harness import Heads, Rig, rowwise, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.backends.native import backend as native
from octavo.backends.native import library, table
from octavo.backends.native.backend import NativeBackend
from octavo.errors import BackendError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf
from octavo.program.planner import Limits, PlannedOp
from octavo.quantization.formats import Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

MakeRig = Callable[..., Rig]
LIMITS = Limits(max_tokens=20, max_seqs=3, max_sampled=5, max_model_len=64)
KINDS = ["embedding", "rms_norm", "add_rms_norm", "linear", "rotary_store_kv", "attention", "gather_rows"]
FIELDS = [name for name, kind in library.OpDesc._fields_ if kind is library._I32]


def bind(make: Callable[..., Rig], spoil: Callable[[PlannedOp, library.OpDesc], None]) -> None:
    """Bind a model of all ops whose descriptors were tampered with; the backend is closed."""
    original = native._OpWriter.write

    def write(self: Any, planned: PlannedOp) -> library.OpDesc:
        desc = original(self, planned)
        spoil(planned, desc)
        return desc

    backend = NativeBackend(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native._OpWriter, "write", write)
        try:
            make(
                backend,
                tiny_model(layers=(Heads(4, 2, 16),), max_positions=64),
                formats={"0.qkv": Format.Q8, "0.o": Format.Q4M},
                limits=LIMITS,
            )
        finally:
            backend.close()


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("embedding", "kind", 99, "no op kind 99 in this build"),
        ("embedding", "format", -1, "the format, -1, is not in [0, "),
        ("embedding", "table_rows", 0, "the number of table rows, 0, is not in [1, 2147483647)"),
        ("embedding", "out_width", 60, "60 elements of a row are not a multiple of 8"),
        ("rms_norm", "out_width", 56, "64 columns of x, but there should be 56"),
        ("rms_norm", "rows", 3, "the kind of rows, 3, is not in [0, 3)"),
        ("add_rms_norm", "residual", None, "no residual"),
        ("linear", "format", 1000, "the format, 1000, is not in [0, "),
        ("linear", "in_width", 0, "the width of x, 0, is not in [1, "),
        ("linear", "weight", 4096 + 32, "a weight at 0x1020, but packed weights begin at multiples of 64"),
        ("linear", "scratch_nbytes", -1, "-1 bytes of scratch memory, but"),
        ("linear", "scratch", None, "bytes of scratch memory, but"),
        ("rotary_store_kv", "head_dim", 12, "12 elements of a head are not a multiple of 8"),
        ("rotary_store_kv", "kv_heads", 0, "the number of KV heads, 0, is not in [1, 65536)"),
        ("rotary_store_kv", "rotary_dim", 17, "the number of rotated elements, 17, is not in [0, 17)"),
        ("rotary_store_kv", "rotary_dim", 5, "5 rotated elements are not a multiple of 2"),
        ("rotary_store_kv", "kv_group", 1, "the KV group, 1, is not in [0, 1)"),
        ("rotary_store_kv", "in_width", 96, "96 columns of x, but there should be 128"),
        ("attention", "q_heads", 5, "5 query heads are not a multiple of 2"),
        ("attention", "kv_dtype", 77, "the KV type, 77, is not in [0, "),
        ("attention", "kv", None, "no KV cache"),
        ("attention", "window", -1, "the window, -1, is not in [0, 2147483647)"),
        ("gather_rows", "in_width", 8, "8 columns of x, but there should be 64"),
    ],
)
def test_shapes_no_kernel_serves(
    make_rig: MakeRig, kind: str, field: str, value: int | None, message: str
) -> None:
    def spoil(planned: PlannedOp, desc: library.OpDesc) -> None:
        if planned.op.kind == kind:
            setattr(desc, field, value)

    with pytest.raises(BackendError, match=rf"native backend: op \d+ \({kind}\), .*{re.escape(message)}"):
        bind(make_rig, spoil)


def test_any_number_anywhere_is_refused_or_makes_sense(make_rig: MakeRig) -> None:
    """Nothing but a refusal comes of it: no crash, and no program of which a part is bound."""

    @settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
    @given(
        index=st.integers(0, 11),
        fields=st.dictionaries(
            st.sampled_from(FIELDS), st.integers(-2, 70) | st.integers(-(2**31), 2**31 - 1), min_size=1
        ),
    )
    def check(index: int, fields: dict[str, int]) -> None:
        seen = iter(range(100))

        def spoil(planned: PlannedOp, desc: library.OpDesc) -> None:
            if next(seen) == index:
                for name, value in fields.items():
                    setattr(desc, name, value)

        try:
            bind(make_rig, spoil)
        except BackendError as why:
            refusal = str(why)
        else:
            refusal = ""
        assert not refusal or refusal.startswith(f"native backend: op {index} ("), refusal

    check()


def test_what_the_table_declines_the_library_refuses(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_require_lanes", lambda what, width: None)

    def norm(b: ProgramBuilder, x: Buf) -> Buf:
        return b.rms_norm(x, b.weight("w", (12,)), eps=1e-5)

    backend = NativeBackend(1)
    with pytest.raises(BackendError, match=r"op 0 \(embedding\), 12 elements of a row are not"):
        make_rig(backend, rowwise(12, 4, norm))
    backend.close()


@pytest.mark.parametrize("field", ["max_tokens", "max_seqs", "max_blocks", "num_groups", "num_blocks"])
def test_limits_that_are_no_numbers_of_things(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    original = library.LimitsDesc
    monkeypatch.setattr(library, "LimitsDesc", lambda **limits: original(**{**limits, field: -1}))
    backend = NativeBackend(1)
    with pytest.raises(BackendError, match=r"native backend: the limit -1 is not in \[0, 1073741824\)"):
        make_rig(backend, tiny_model(layers=(Heads(),), max_positions=64), limits=LIMITS)
    backend.close()
