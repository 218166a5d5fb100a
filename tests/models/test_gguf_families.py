"""GGUF files of every family against transformers: tiny random models, written as llama.cpp's converter does.

Oracle and tolerance are those of test_families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_families import FAMILIES, VOCAB, make_model, make_runner, oracle

from gguf_converter import encode_as, write_gguf

#: What a converter loses: Qwen2's windows, and that Qwen3-MoE may keep its shares as they are.
LOST = ("qwen2 window", "qwen3 moe, shares as they are")
#: What GGUF takes for granted: which layers have windows, rotation, experts; the root that divides scores.
GRANTED: dict[str, dict[str, Any]] = {
    "qwen3 moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "smollm3, every fourth layer": {"no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    },
}
CONVERTED = [name for name in FAMILIES if name not in LOST]


def written(path: Path, family: str, types: str = "F32", **changes: Any) -> tuple[Path, Any]:
    """A family's file, and the model with the weights that the file holds."""
    model = make_model(family, **{**GRANTED.get(family, {}), **changes})
    file = path / f"{family.replace(' ', '-')}.gguf"
    write_gguf(file, model, encode=encode_as(types))
    return file, model


@pytest.mark.parametrize("family", CONVERTED)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, family)
    rng = np.random.default_rng(0)
    runner = make_runner(path, max_num_batched_tokens=256, max_num_seqs=256, max_model_len=128)
    for length in (9, 100):
        ids = rng.integers(0, VOCAB, (2, length)).tolist()
        exact, error = oracle(model, ids)
        assert np.abs(runner.predict(ids) - exact).max() <= 32 * max(error, 1e-7 * np.abs(exact).max())
