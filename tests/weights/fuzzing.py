"""Damage to model files: of their bytes, of what their fields say, of their JSON.

`mutate_gguf(data, rng)` and `mutate_directory(path, rng)` do one to three things that a fault or an attacker
could, and say what they did. Everything comes from `rng`, so a case is known by its seed.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Families whose builders read keys that a Llama's config lacks.
FAMILIES = [
    "llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "mixtral", "qwen3_moe", "gemma2", "gemma3_text",
    "olmo2", "gemma3", "gpt2", "",
]  # fmt: skip
#: Keys that some family, or the reader, looks at.
CONFIG_KEYS = [
    "sliding_window", "layer_types", "rope_scaling", "rope_theta", "quantization_config", "num_local_experts",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step",
    "norm_topk_prob", "use_sliding_window", "max_window_layers", "residual_multiplier", "logits_scaling",
    "embedding_multiplier", "attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "partial_rotary_factor", "original_max_position_embeddings",
    "hidden_activation", "sliding_window_pattern", "rope_local_base_freq", "tie_word_embeddings", "head_dim",
]  # fmt: skip
ROPE_KEYS = [
    "rope_type", "type", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "short_factor", "long_factor",
    "partial_rotary_factor", "truncate", "full_attention", "sliding_attention",
]  # fmt: skip
ROPE_TYPES = ["default", "linear", "llama3", "yarn", "longrope", "dynamic", "none"]
JUNK: list[Any] = [
    None, True, False, 0, 1, 2, 3, 7, 8, 64, -1, -(2**63), 2**31 - 1, 2**31, 2**32, 2**60, 2**63, 10**400,
    0.5, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, "", "x", "1", "silu",
    "gelu_pytorch_tanh", "a" * 100_000, "\ud800", "\x00", [], [1], [0.5] * 8, [1, "x"], [None] * 3, [[[]]],
    {}, {"a": 1}, {"rope_type": "yarn", "factor": 0}, ["sliding_attention", "full_attention"],
]  # fmt: skip

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Field:
    """A number or a name in a GGUF header."""

    what: str
    start: int
    size: int


def gguf_fields(data: bytes) -> tuple[list[Field], int]:
    """The fields of a sound GGUF header, and where it ends."""
    fields = [Field("version", 4, 4), Field("count", 8, 8), Field("count", 16, 8)]
    at = 24

    def take(what: str, size: int) -> int:
        nonlocal at
        fields.append(Field(what, at, size))
        at += size
        return at - size

    def string(what: str) -> None:
        (size,) = _U64.unpack_from(data, take("length", 8))
        take(what, size)

    def value(kind: int) -> None:
        nonlocal at
        if kind == _STRING:
            string("text")
        elif kind == _ARRAY:
            (element,) = _U32.unpack_from(data, take("type", 4))
            (count,) = _U64.unpack_from(data, take("length", 8))
            if element == _STRING:
                for _ in range(count):
                    string("text")
            else:
                take("numbers", count * _SIZES[element])
        else:
            take("number", _SIZES[kind])

    tensors, entries = (_U64.unpack_from(data, start)[0] for start in (8, 16))
    for _ in range(entries):
        string("key")
        value(_U32.unpack_from(data, take("type", 4))[0])
    for _ in range(tensors):
        string("name")
        (dims,) = _U32.unpack_from(data, take("n_dims", 4))
        for _ in range(dims):
            take("dim", 8)
        take("type", 4)
        take("offset", 8)
    return fields, at


def mutate_gguf(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A damaged copy of a sound GGUF file, and what was done to it."""
    fields, end = gguf_fields(data)
    out = bytearray(data)
    done = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        way = rng.random()
        if way < 0.55:
            done.append(_mutate_field(out, fields, rng))
        elif way < 0.9:
            done.append(damage_bytes(out, rng, end))
        else:
            done.append(truncate(out, rng))
            break
    return bytes(out), "; ".join(done)


def _mutate_field(out: bytearray, fields: list[Field], rng: random.Random) -> str:
    kinds = sorted({field.what for field in fields})
    what = rng.choice((*kinds, "number", "number", "type", "dim"))  # less often what is refused at once
    field = rng.choice([field for field in fields if field.what == what])
    others = [other for other in fields if other.what == what and other.size == field.size]
    if rng.random() < 0.3:  # a duplicate name, an overlapping offset, a type of another value
        other = rng.choice(others)
        new = bytes(out[other.start : other.start + other.size])
    elif field.what in ("type", "n_dims", "version"):
        new = _U32.pack(rng.choice((*range(42), 0xFF, 2**31, 2**32 - 1)))
    elif field.size == 8 and field.what in ("count", "length", "dim", "offset"):
        (old,) = _U64.unpack_from(out, field.start)
        near = (old + 1, old - 1, old * 2, old // 2, old + 32, 0, 1)
        new = _U64.pack(rng.choice((*near, 2**31, 2**32, 2**60, 2**63, 2**64 - 1)) % 2**64)
    else:
        choices = [
            bytes(field.size),
            b"\xff" * field.size,
            rng.randbytes(field.size),
            (b"\x00\x00\x80\x7f" * (field.size // 4 + 1))[: field.size],  # inf as f32
            (b"\x01" + bytes(field.size))[: field.size],
        ]
        new = rng.choice(choices)
    out[field.start : field.start + field.size] = new
    return f"{field.what} at {field.start} = {new[:16].hex()}"


def damage_bytes(out: bytearray, rng: random.Random, header: int) -> str:
    """Flip bits or overwrite a run, more often in the first `header` bytes than behind them."""
    if not out:
        return "nothing to damage"
    end = min(header, len(out)) if rng.random() < 0.7 else len(out)
    if rng.random() < 0.5:
        places = [rng.randrange(end) for _ in range(rng.randint(1, 8))]
        for place in places:
            out[place] ^= 1 << rng.randrange(8)
        return f"bits flipped at {places}"
    start, size = rng.randrange(end), rng.choice((1, 2, 4, 8, 64, 1000))
    run = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    out[start : start + size] = run[: len(out) - start]
    return f"{size} bytes at {start} = {run[:8].hex()}..."


def truncate(out: bytearray, rng: random.Random) -> str:
    """Cut the file off anywhere."""
    length = rng.choice((0, 1, 4, 7, 8, rng.randint(0, len(out)), rng.randint(0, len(out)), len(out) - 1))
    del out[max(length, 0) :]
    return f"cut off at {length}"


# -- directories ------------------------------------------------------------------------------------


def mutate_directory(directory: Path, rng: random.Random) -> str:
    """Damage a directory's files where they lie; what was done."""
    ways: list[tuple[Callable[[Path, random.Random], str], int]] = [
        (_mutate_config, 8),
        (_mutate_json_file, 4),
        (_mutate_index, 2),
        (_mutate_header, 6),
        (_mutate_bytes, 4),
        (_remove_file, 1),
    ]
    chosen = rng.choices([way for way, _ in ways], [weight for _, weight in ways], k=rng.choice((1, 1, 2, 3)))
    return "; ".join(way(directory, rng) for way in chosen)


def _mutate_config(directory: Path, rng: random.Random) -> str:
    path = directory / "config.json"
    config = _read(path)
    if not isinstance(config, dict):
        return "config.json is no object any more"
    way = rng.random()
    if way < 0.15:
        family = rng.choice(FAMILIES)
        config["model_type"] = family
        done = f"model_type = {family!r}"
        if rng.random() < 0.5:  # what the family wants, so that more of its builder runs
            config |= {key: rng.choice((1, 2, 0.5, 4)) for key in rng.sample(CONFIG_KEYS, 6)}
            done += " and more keys"
    elif way < 0.4:
        rope = (
            dict(config.get("rope_parameters") or {})
            if isinstance(config.get("rope_parameters"), dict)
            else {}
        )
        rope["rope_type"] = rng.choice(ROPE_TYPES)
        rope |= {
            key: rng.choice((1, 2, 8.0, 32, 0.5)) for key in rng.sample(ROPE_KEYS, 6) if key != "rope_type"
        }
        key = rng.choice((*ROPE_KEYS, "rope_theta"))
        rope[key] = rng.choice(JUNK)
        config["rope_parameters"] = rope
        done = f"rope_parameters = {_short(rope)}"
    elif way < 0.5:
        key = rng.choice(list(config))
        del config[key]
        done = f"{key} deleted"
    else:
        key = rng.choice((*config, *CONFIG_KEYS))
        config[key] = rng.choice(JUNK)
        done = f"{key} = {_short(config[key])}"
    _write(path, config)
    return done


def _mutate_json_file(directory: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(directory.glob("*.json")))
    value = _read(path)
    place = _mutate_node(value, rng) if isinstance(value, dict | list) and value else "(replaced)"
    if place == "(replaced)":
        value = rng.choice(JUNK)
    _write(path, value)
    return f"{path.name}: {place}"


def _mutate_node(value: Any, rng: random.Random) -> str:
    """Replace, delete or repeat one node somewhere in a JSON value."""
    path = ""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        path += f"/{str(key)[:40]}"
        inner = value[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            value = inner
            continue
        way = rng.random()
        if way < 0.2:
            del value[key]
            return f"{path} deleted"
        if way < 0.3 and isinstance(value, list):
            value.append(inner)
            return f"{path} repeated"
        if way < 0.5:
            value[key] = value[rng.choice(keys)]
            return f"{path} = its neighbour"
        value[key] = rng.choice(JUNK)
        return f"{path} = {_short(value[key])}"


def _mutate_index(directory: Path, rng: random.Random) -> str:
    path = directory / "model.safetensors.index.json"
    index = _read(path)
    if (
        not isinstance(index, dict)
        or not isinstance(index.get("weight_map"), dict)
        or not index["weight_map"]
    ):
        return "no index any more"
    name = rng.choice(sorted(index["weight_map"]))
    junk = ["../model.safetensors", "/etc/passwd", "config.json", "none.safetensors", "", *JUNK]
    index["weight_map"][name] = rng.choice((*junk, *index["weight_map"].values()))
    _write(path, index)
    return f"index: {name} in {_short(index['weight_map'][name])}"


def _mutate_header(directory: Path, rng: random.Random) -> str:
    """Change what a safetensors header says."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        return "no safetensors any more"
    path = rng.choice(paths)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        name = rng.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
        key = rng.choice(("dtype", "shape", "data_offsets"))
        old = entry[key]
        numbers = (0, 1, -1, 0.5, 2**31, 2**60, 2**63, True, None)
        if key == "dtype":
            new: Any = rng.choice(("F16", "BF16", "F64", "I8", "F8_E4M3", "U8", "BOOL", "Q4", 4, None))
        elif rng.random() < 0.5:
            new = [rng.choice((n, n, n + 1, n - 1, *numbers)) for n in old]
        else:
            new = rng.choice((old[::-1], [*old, 1], old[1:], [2**32, 2**32], [0, 2**60], *JUNK))
        entry[key] = new
    except (ValueError, LookupError, TypeError):
        return "the header was damaged before"
    text = json.dumps(header)
    if rng.random() < 0.1:  # twice the same name, which json.dumps can't write
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(entry)}}}"
    raw = text.encode()
    length = rng.choice((len(raw),) * 12 + (0, 1, len(raw) - 1, len(raw) + 1, 2**40, 2**63))
    path.write_bytes(length.to_bytes(8, "little") + raw + data[8 + size :])
    return f"{path.name}: {name}.{key} = {_short(new)}, length {length - len(raw):+}"


def _mutate_bytes(directory: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    out = bytearray(path.read_bytes())
    done = truncate(out, rng) if rng.random() < 0.3 else damage_bytes(out, rng, 400)
    path.write_bytes(out)
    return f"{path.name}: {done}"


def _remove_file(directory: Path, rng: random.Random) -> str:
    path = rng.choice(sorted(directory.iterdir()))
    if rng.random() < 0.5:
        path.unlink()
        return f"{path.name} removed"
    path.rename(path.with_suffix(".bin"))
    return f"{path.name} renamed to .bin"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _short(value: object) -> str:
    return repr(value)[:80]
