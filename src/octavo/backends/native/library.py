"""liboctavo_cpu.so through ctypes: finding it, its structs, its functions.

Rule: this file mirrors csrc/cpu/octavo.h, and `ABI_VERSION` says which version of it. A missing or
foreign library is an error only for who asks for the native backend.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from pathlib import Path

from octavo.backends.native.elf import why_not_loadable
from octavo.errors import ConfigError
from octavo.platforms import cpu

LIBRARY_NAME = "liboctavo_cpu.so"
ABI_VERSION = 4
#: pip would keep what is installed, and take a wheel that it built without a compiler from its cache.
HOW_TO_BUILD = (
    "Install a C++17 compiler (g++ or clang++) and Octavo again: "
    "pip install --force-reinstall --no-deps --no-cache-dir octavo"
)

_Pointer = ctypes.c_void_p
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_F32 = ctypes.c_float
_F64 = ctypes.c_double


class Isa(enum.IntEnum):
    """Which build of the kernels runs."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX512 = 3
    NEON = 4
    NEON_DOT = 5


class FormatCode(enum.IntEnum):
    """OctavoFormat."""

    F32 = 0
    Q4M = 1
    Q8 = 2
    F16 = 3
    BF16 = 4
    Q4 = 5
    Q8G16 = 6


class DTypeCode(enum.IntEnum):
    """OctavoDType."""

    F32 = 0
    F16 = 1
    BF16 = 2


class RowsCode(enum.IntEnum):
    """OctavoRows."""

    TOKENS = 0
    SEQS = 1
    SAMPLED = 2


class ActivationCode(enum.IntEnum):
    """OctavoActivation."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED_SWIGLU = 2


class OpCode(enum.IntEnum):
    """OctavoOpKind."""

    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    LINEAR = 3
    ROTARY_STORE_KV = 4
    ATTENTION = 5
    GATED_ACTIVATION = 6
    GATHER_ROWS = 7
    ADD = 8
    QK_NORM = 9
    SCALE_LOGITS = 10
    MOE = 11


class ExpertsDesc(ctypes.Structure):
    """OctavoExperts."""

    _fields_ = [
        ("num_experts", _I32),
        ("top_k", _I32),
        ("normalize", _I32),
        ("width", _I32),
        ("router_format", _I32),
        ("gate_up_format", _I32),
        ("down_format", _I32),
        ("router", _Pointer),
        ("gate_up", _Pointer),
        ("down", _Pointer),
        ("router_bias", _Pointer),
        ("gate_up_bias", _Pointer),
        ("down_bias", _Pointer),
    ]


class OpDesc(ctypes.Structure):
    """OctavoOp."""

    _fields_ = [
        ("kind", _I32),
        ("rows", _I32),
        ("format", _I32),
        ("kv_dtype", _I32),
        ("in_width", _I32),
        ("out_width", _I32),
        ("table_rows", _I32),
        ("q_heads", _I32),
        ("kv_heads", _I32),
        ("head_dim", _I32),
        ("rotary_dim", _I32),
        ("kv_group", _I32),
        ("window", _I32),
        ("activation", _I32),
        ("norm_together", _I32),
        ("scale", _F32),
        ("softcap", _F32),
        ("eps", _F32),
        ("activation_bits", _I32),
        ("scratch_nbytes", _I64),
        ("x", _Pointer),
        ("residual", _Pointer),
        ("weight", _Pointer),
        ("k_weight", _Pointer),
        ("sinks", _Pointer),
        ("bias", _Pointer),
        ("out", _Pointer),
        ("out_sum", _Pointer),
        ("kv", _Pointer),
        ("scratch", _Pointer),
        ("experts", ctypes.POINTER(ExpertsDesc)),
    ]


class Inputs(ctypes.Structure):
    """OctavoInputs."""

    _fields_ = [
        ("token_ids", _Pointer),
        ("positions", _Pointer),
        ("rope_rows", _Pointer),
        ("cu_q", _Pointer),
        ("seq_lens", _Pointer),
        ("slot_mapping", _Pointer),
        ("block_table", _Pointer),
        ("sampled_rows", _Pointer),
    ]


class LimitsDesc(ctypes.Structure):
    """OctavoLimits."""

    _fields_ = [
        ("max_tokens", _I32),
        ("max_seqs", _I32),
        ("max_sampled", _I32),
        ("max_blocks", _I32),
        ("num_groups", _I32),
        ("num_blocks", _I32),
    ]


class Status(ctypes.Structure):
    """OctavoStatus. `code` is 0 if the call did what it was asked to."""

    _fields_ = [
        ("code", _I32),
        ("op", _I32),
        ("row", _I32),
        ("cause", ctypes.c_char * 180),
    ]


class PackJob(ctypes.Structure):
    """OctavoPackJob."""

    _fields_ = [
        ("format", _I32),
        ("width", _I32),
        ("num_rows", _I64),
        ("first_row", _I64),
        ("raw", _Pointer),
        ("row_order", _Pointer),
        ("packed", _Pointer),
    ]


class Choice(ctypes.Structure):
    """OctavoChoice."""

    _fields_ = [
        ("logits", _Pointer),
        ("seed", ctypes.c_uint64),
        ("temperature", _F64),
        ("top_p", _F64),
        ("log_min_p", _F64),
        ("top_k", _I32),
        ("position", _I32),
        ("token_id", _I32),
    ]


class QuantizeJob(ctypes.Structure):
    """OctavoQuantizeJob."""

    _fields_ = [
        ("format", _I32),
        ("width", _I32),
        ("num_rows", _I64),
        ("values", _Pointer),
        ("raw", _Pointer),
    ]


def load() -> ctypes.CDLL:
    """The library, its functions typed. Raises ConfigError with the reason if there is none."""
    library, reason = _try_load()
    if library is None:
        raise ConfigError(
            f"the native backend is not available: {reason}. {HOW_TO_BUILD}; or choose the torch backend"
        )
    return library


def available() -> bool:
    """Whether the native backend can be used here."""
    return _try_load()[0] is not None


def why_unavailable() -> str | None:
    """Why `available()` is false; None if it is true."""
    return _try_load()[1]


@functools.cache
def _try_load() -> tuple[ctypes.CDLL | None, str | None]:
    folders = _package_folders()
    found = [path for path in (folder / LIBRARY_NAME for folder in folders) if path.is_file()]
    if not found:
        return None, f"there is no {LIBRARY_NAME} in {', '.join(map(str, folders))}"
    path = max(found, key=lambda path: path.stat().st_mtime)  # the one built last
    try:
        damage = why_not_loadable(path, cpu.architecture())
        if damage is not None:
            return None, f"{path} {damage}"
        library = ctypes.CDLL(str(path))
        version = int(library.octavo_version())
    except (OSError, AttributeError) as why:
        return None, f"{path} could not be loaded: {why}"
    if version != ABI_VERSION:
        return None, (
            f"{path} is of another build: it has interface {version}, but this Octavo speaks {ABI_VERSION}"
        )
    try:
        _declare(library)
    except AttributeError as why:
        return None, f"{path} is of another build: {why}"
    return library, None


def _package_folders() -> list[Path]:
    """Where this package's files may lie. In an editable install pip puts the library into site-packages
    and leaves the sources where they are; a developer's own build goes next to the sources."""
    import octavo.backends.native as package

    return [Path(folder) for folder in dict.fromkeys([*package.__path__, str(Path(__file__).parent)])]


def _declare(library: ctypes.CDLL) -> None:
    context = _Pointer
    signatures: dict[str, tuple[object, list[object]]] = {
        "octavo_create": (context, [_I32, _I32]),
        "octavo_destroy": (None, [context]),
        "octavo_isa": (ctypes.c_char_p, [context]),
        "octavo_pack": (None, [context, ctypes.POINTER(PackJob)]),
        "octavo_quantize": (None, [context, ctypes.POINTER(QuantizeJob)]),
        "octavo_bind": (
            None,
            [
                context,
                ctypes.POINTER(OpDesc),
                _I32,
                ctypes.POINTER(Inputs),
                ctypes.POINTER(LimitsDesc),
                ctypes.POINTER(Status),
            ],
        ),
        "octavo_run": (None, [context, _I32, _I32, _I32, ctypes.POINTER(Status)]),
        "octavo_choose": (None, [context, ctypes.POINTER(Choice), _I32, _I32, _Pointer]),
        "octavo_choice_scratch": (_I64, [context, _I32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
