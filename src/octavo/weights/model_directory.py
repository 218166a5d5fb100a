"""The files of a model's directory in Hugging Face's layout: their names, and how JSON among them is read.

Rule: no numpy. Who asks where a model lies, which is asked before anything is loaded, imports this.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 100_000_000


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes; CheckpointError names the file."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise CheckpointError(f"{path} is longer than {limit} bytes")
        value = json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads: an object whose keys differ, or ValueError. JSON's own rule is that the last wins."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key[:200]!r} appears twice")
        result[key] = value
    return result
