"""config.json, made uniform: one spelling for what versions of transformers spell differently.

Rule: keys keep their names and values; derived keys are added, and what makes no sense is refused by its
key. Version 5 of transformers writes rope_parameters where earlier ones wrote rope_theta and rope_scaling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import CheckpointError, UnsupportedModelError

_LARGEST = 1e30  # a float holds it, whatever the file wrote
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)


def normalised(config: dict[str, Any], path: Path, *, has_head: bool) -> dict[str, Any]:
    """The config with these keys always there, besides those of every model:

    num_key_value_heads, head_dim, rotary_dim, rope_theta, tie_word_embeddings; rope_scaling: None, or a dict
    with "rope_type". path: of config.json, for errors. has_head: whether there is an lm_head.
    """
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{path}: the weights are quantised by {str(method)[:80]!r}, which is not served; use the "
            "model's unquantised directory, or a GGUF file of it"
        )
    for key in _COUNTS:
        _count(config, key, path)
    _positive(config, "rms_norm_eps", path)
    heads = config["num_attention_heads"]
    derived = dict(config)
    for key, default in (
        ("num_key_value_heads", heads),
        ("head_dim", max(config["hidden_size"] // heads, 1)),
    ):
        derived[key] = default if config.get(key) is None else _count(config, key, path)
    derived["tie_word_embeddings"] = _flag(config, "tie_word_embeddings", not has_head, path)
    return derived | _rope(derived, path)


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """rope_theta, rope_scaling and rotary_dim, from either spelling."""
    rope = _object(config, "rope_parameters", path) or _object(config, "rope_scaling", path)
    if any(isinstance(value, dict) for value in rope.values()):
        raise UnsupportedModelError(f"{path}: rotation that differs between layers is not served yet")
    merged = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    for source in (config, rope):
        for key in merged:
            if source.get(key) is not None:
                merged[key] = _positive(source, key, path)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str):
        _refuse(path, "rope_type", kind, "a name")
    plain = kind in ("default", "none")
    return {
        "rope_theta": merged["rope_theta"],
        "rope_scaling": None if plain else {**rope, "rope_type": kind},
        "rotary_dim": max(1, int(config["head_dim"] * merged["partial_rotary_factor"])),
    }


def _object(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        _refuse(path, key, value, "an object")
    return value


def _count(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < 2**31:
        _refuse(path, key, value, "a whole number of at least 1")
    return value


def _positive(config: dict[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        _refuse(path, key, value, "a number above 0")
    return float(value)


def _flag(config: dict[str, Any], key: str, default: bool, path: Path) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        _refuse(path, key, value, "true or false")
    return value


def _refuse(path: Path, key: str, value: object, wanted: str) -> NoReturn:
    if value is None:
        raise CheckpointError(f"{path}: {key} is missing")
    raise CheckpointError(f"{path}: {key} is {str(value)[:200]!r}; only {wanted} makes sense")
