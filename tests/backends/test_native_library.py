"""Finding and loading the native library, and what the backend refuses to start with."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from harness import Heads, Rig, attention_only, rowwise, tiny_model

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.backends.native.elf import MACHINES
from octavo.backends.native.table import NativeKernelTable
from octavo.errors import BackendError, ConfigError, ProgramError
from octavo.platforms import cpu
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, DType, Op
from octavo.program.planner import Kernel, Limits, SealedProgram, seal
from octavo.quantization.formats import Format

MakeRig = Callable[..., Rig]
needs_library = pytest.mark.skipif(not library.available(), reason="the native library is not built")
LIMITS = Limits(max_tokens=32, max_seqs=2, max_sampled=4, max_model_len=64)


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes the library be looked for in one folder only."""

    def search(folder: Path) -> None:
        monkeypatch.setattr(library, "_package_folders", lambda: [folder])
        library._try_load.cache_clear()

    yield search
    monkeypatch.undo()
    library._try_load.cache_clear()


def test_a_missing_library_is_an_error_for_who_asks_for_it(
    searching: Callable[[Path], None], tmp_path: Path
) -> None:
    searching(tmp_path)
    assert not library.available()
    assert library.why_unavailable() == f"there is no liboctavo_cpu.so in {tmp_path}"
    with pytest.raises(
        ConfigError, match=r"not available: there is no liboctavo_cpu.so in .*Install a C\+\+17"
    ):
        NativeBackend(1)


@pytest.mark.parametrize("content", [b"", b"\x7fEL", b"not a library", b"MZ" * 500])
def test_a_file_that_is_no_library(searching: Callable[[Path], None], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / library.LIBRARY_NAME
    path.write_bytes(content)
    searching(tmp_path)
    assert library.why_unavailable() == f"{path} is not a shared library"


@needs_library
def test_a_library_of_another_architecture(
    searching: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called "cannot open shared object file: No such file or directory" by the loader."""
    path = tmp_path / library.LIBRARY_NAME
    content = bytearray(Path(library.load()._name).read_bytes())
    content[18:20] = MACHINES["riscv64"].to_bytes(2, "little")
    path.write_bytes(content)
    monkeypatch.setattr(cpu, "architecture", lambda: "x86_64")
    searching(tmp_path)
    reason = f"{path} is of another architecture: it is for riscv64, but this machine is x86_64"
    assert library.why_unavailable() == reason
    with pytest.raises(ConfigError, match=f"not available: {re.escape(reason)}. Install a C"):
        NativeBackend(1)


@needs_library
def test_a_library_cut_short_anywhere(searching: Callable[[Path], None], tmp_path: Path) -> None:
    """The loader maps what is missing, and the process dies when it is touched."""
    path = tmp_path / library.LIBRARY_NAME
    whole = Path(library.load()._name).read_bytes()
    for length in [*range(4, 1000, 7), *np.linspace(1000, len(whole) - 1, 50).astype(int)]:
        path.write_bytes(whole[:length])
        searching(tmp_path)
        assert f"{path} is cut short: it has {length} bytes" in (library.why_unavailable() or "")
    path.write_bytes(whole)
    searching(tmp_path)
    assert library.available()


@needs_library
def test_a_library_of_another_build(
    searching: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(library.load()._name, tmp_path)
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    searching(tmp_path)
    assert f"has interface {library.ABI_VERSION - 1}, but" in (library.why_unavailable() or "")


@needs_library
def test_it_is_found_here() -> None:
    assert library.why_unavailable() is None
    assert library.load().octavo_version() == library.ABI_VERSION


def test_structs_have_the_size_of_their_c_twins() -> None:
    assert ctypes.sizeof(library.OpDesc) == 20 * 4 + 12 * 8
    assert ctypes.sizeof(library.ExpertsDesc) == 7 * 4 + 4 + 6 * 8
    assert ctypes.sizeof(library.Inputs) == 8 * 8
    assert ctypes.sizeof(library.LimitsDesc) == 6 * 4
    assert ctypes.sizeof(library.Status) == 3 * 4 + 180
    assert ctypes.sizeof(library.PackJob) == 2 * 4 + 2 * 8 + 3 * 8


@needs_library
def test_the_backend_says_which_kernels_run() -> None:
    backend = NativeBackend(1, "scalar")
    assert backend.isa == "scalar"
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="used after close"):
        backend.run(1, 1, 1)


@needs_library
@pytest.mark.parametrize(
    ("threads", "isa", "message"),
    [
        (0, "auto", "at least 1 thread, not 0"),
        (1, "avx9000", "no ISA 'avx9000'; known: auto, scalar, avx2, avx512"),
    ],
)
def test_settings_that_cannot_work(threads: int, isa: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NativeBackend(threads, isa)


@needs_library
def test_running_before_binding_is_refused() -> None:
    backend = NativeBackend(1)
    with pytest.raises(BackendError, match="no program is bound"):
        backend.run(1, 1, 1)
    backend.close()


# -- the table ----------------------------------------------------------------------------------


def sealed(build: Callable[[ProgramBuilder], Buf]) -> SealedProgram:
    """The program, sealed for this backend."""
    builder = ProgramBuilder("test", format_of=lambda parts: Format.F32, kv_dtype=DType.F16)
    return seal(builder.build(build(builder)), LIMITS, NativeKernelTable(2))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (rowwise(12, 8, lambda b, x: x), "embedding: rows of 12 elements are not a multiple of 8"),
        (
            rowwise(16, 8, lambda b, x: b.gated_activation(b.linear(x, b.weight("w", (12, 16))), "silu")),
            "gated_activation: rows of 6 elements are not a multiple of 8",
        ),
        (attention_only(Heads(2, 2, 12), 8, 64), "attention: heads of 12 elements are not a multiple of 8"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(
    build: Callable[[ProgramBuilder], Buf], reason: str
) -> None:
    with pytest.raises(ProgramError, match=reason):
        sealed(build)


class ShortTable(NativeKernelTable):
    """Bills one byte less than it should for ops of one kind."""

    def __init__(self, num_threads: int, kind: str) -> None:
        super().__init__(num_threads)
        self._kind = kind

    def choose(self, op: Op, limits: Limits) -> Kernel:
        """The kernel, short of scratch."""
        kernel = super().choose(op, limits)
        if op.kind == self._kind and kernel.scratch_nbytes:
            return Kernel(kernel.name, kernel.scratch_nbytes - 1)
        return kernel


@needs_library
@pytest.mark.parametrize(
    ("format_", "activation_bits"),
    [*((format_, 16) for format_ in Format), (Format.Q4, 8), (Format.Q4M, 8)],
)
@pytest.mark.parametrize("dtype", list(DType))
def test_scratch_sizes_are_the_librarys_to_the_byte(
    make_rig: MakeRig, format_: Format, activation_bits: int, dtype: DType
) -> None:
    """The library computes what each kernel needs by itself, and refuses a byte less than the bill."""
    names = ("qkv", "gate_up", "down")
    build = tiny_model(hidden=96, ffn=160, layers=(Heads(5, 1, 24), Heads(6, 3, 8)), max_positions=64)
    options = {
        "limits": Limits(max_tokens=37, max_seqs=3, max_sampled=5, max_model_len=64),
        "formats": {f"{i}.{name}": format_ for i in range(2) for name in names},
        "kv_dtype": dtype,
        "activation_bits": activation_bits,
    }
    make_rig(NativeBackend(5), build, **options)
    for kind in ("linear", "rotary_store_kv", "attention"):
        if kind == "linear" and not format_.quantized:
            continue
        backend = NativeBackend(5)
        backend.table = ShortTable(5, kind)
        with pytest.raises(BackendError, match=rf"op \d+ \({kind}\), \d+ bytes of scratch memory, but"):
            make_rig(backend, build, **options)
        backend.close()
