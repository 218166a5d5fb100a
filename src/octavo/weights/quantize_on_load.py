"""Which weights are quantised when a model is loaded, and to what: `--quantization`.

Rule: only what is stored plain; a model that was quantised keeps what it has.

                                             int8   int4
    matrices of attention, MLPs, experts     q8     q4m
    embeddings and heads                     q8     q8
    routers, norms, biases                   as they are
    rows of no multiple of 32                as they are

q4m rather than q4: its error is a fifth smaller, and a weight has 5 bits instead of 4.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from octavo.quantization.formats import Format

#: Matrices of attention and of MLPs, experts' too; not routers, embeddings, heads.
PROJECTION = re.compile(
    r"model\..+\.(q|k|v|o|qkv|gate|up|down|gate_up)_proj\.weight|model\..+\.experts\.\d+\.w[123]\.weight"
)
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_FORMATS = {"int8": Format.Q8, "int4": Format.Q4M}


def format_on_load(parts: Iterable[str], quantization: str) -> Format | None:
    """The format that a matrix stacked from these tensors is quantised to; None if it is kept."""
    if quantization == "none":
        return None
    names = list(parts)
    if all(PROJECTION.fullmatch(name) for name in names):
        return _FORMATS[quantization]
    return Format.Q8 if all(name in _VOCABULARY for name in names) else None
