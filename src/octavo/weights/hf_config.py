"""config.json, made uniform: one spelling for what versions of transformers spell differently.

Rule: keys keep their names and values; derived keys are added, and what makes no sense is refused by its
key. Version 5 of transformers writes rope_parameters where earlier ones wrote rope_theta and rope_scaling.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import CheckpointError

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

    num_key_value_heads, head_dim, rotary_dim, tie_word_embeddings; rope_parameters with "rope_type" and
    "rope_theta", or a dict of such for each kind of layer. path: of config.json, for errors. has_head:
    whether there is an lm_head.
    """
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
    if config.get("num_local_experts") is None and config.get("num_experts") is not None:
        derived["num_local_experts"] = config["num_experts"]  # as version 4 of transformers wrote it
    derived["tie_word_embeddings"] = _flag(config, "tie_word_embeddings", not has_head, path)
    return derived | _rope(derived, path)


def _rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """rope_parameters and rotary_dim, from any spelling."""
    rope = _object(config, "rope_parameters", path) or _object(config, "rope_scaling", path)
    if any(isinstance(value, dict) for value in rope.values()):  # one for each kind of layer
        kinds = {kind: _one_rope(config, _object(rope, kind, path), path) for kind in rope}
    elif config.get("rope_local_base_freq") is not None:  # Gemma 3, as version 4 of transformers wrote it
        local = {"rope_theta": _positive(config, "rope_local_base_freq", path)}
        kinds = {
            "full_attention": _one_rope(config, rope, path),
            "sliding_attention": _one_rope(config, local, path),
        }
    else:
        kinds = {"": _one_rope(config, rope, path)}
    part = next(iter(kinds.values())).get("partial_rotary_factor", 1.0)
    return {
        "rope_parameters": kinds.get("", kinds),
        "rotary_dim": max(1, int(config["head_dim"] * part)),
    }


def _one_rope(config: dict[str, Any], rope: dict[str, Any], path: Path) -> dict[str, Any]:
    """rope with "rope_type" and "rope_theta", which may stand beside it in the config."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str):
        _refuse(path, "rope_type", kind, "a name")
    merged: dict[str, Any] = {**rope, "rope_type": "default" if kind == "none" else kind}
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        source = rope if rope.get(key) is not None else config
        merged[key] = default if source.get(key) is None else _positive(source, key, path)
    if config.get("original_max_position_embeddings") is not None:
        merged.setdefault(
            "original_max_position_embeddings", _count(config, "original_max_position_embeddings", path)
        )
    return merged


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
