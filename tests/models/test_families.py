"""Every family and rope type against transformers: a tiny random model, whole, chunked and batched.

The oracle runs in float64. The tolerance is 32 times transformers' own float32 error on the same input: the
same operations in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import ModelRunner
from octavo.backends.torch.backend import TorchBackend
from octavo.config.resolve import resolve
from octavo.errors import ProgramError

Save = Callable[[Any], Path]
VOCAB = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)],
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": LAYERS}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama linear rope": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}
    ),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 part of a head": (
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75
            },
        },
    ),
    "phi3 longrope": (
        "phi3",
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3, every fourth layer": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen3 moe": (
        "qwen3_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe, shares as they are": (
        "qwen3_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
            "norm_topk_prob": False,
        },
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3_text", GEMMA),
}  # fmt: skip


def make_model(family: str, seed: int = 0) -> Any:
    kind, differences = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SMALL, **differences})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # they take float64
    model = AutoModelForCausalLM.from_config(config, **eager).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() >= 2:
                parameter.mul_(3)  # logits that spread, attention that looks somewhere
    return model


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a model as transformers does, and says where."""

    def write(model: Any) -> Path:
        model.save_pretrained(tmp_path)
        return tmp_path

    return write


def make_runner(path: Path, **settings: Any) -> ModelRunner:
    return ModelRunner(path, resolve(settings).config, backend=TorchBackend(num_threads=1))


def oracle(model: Any, ids: list[list[int]]) -> tuple[np.ndarray, float]:
    """float64 logits, and float32's error."""
    with torch.inference_mode():
        single = model(torch.tensor(ids)).logits.numpy()
        exact = model.double()(torch.tensor(ids)).logits.numpy()
        torch.nn.Module.float(model)
    return exact, float(np.abs(single - exact).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, save: Save) -> None:
    model = make_model(family)
    path = save(model)
    rng = np.random.default_rng(0)
    # around a window of 8, and five of it; around the original context of 32 of longrope
    for length in (7, 8, 9, 20, 32, 33, 40, 100):
        ids = rng.integers(0, VOCAB, (2, length)).tolist()
        exact, error = oracle(model, ids)
        whole = make_runner(path, max_num_batched_tokens=256, max_num_seqs=256, max_model_len=128)
        logits = whole.predict(ids)
        assert np.abs(logits - exact).max() <= 32 * max(error, 1e-7 * np.abs(exact).max())
        chunked = make_runner(path, max_num_batched_tokens=5, max_num_seqs=5, max_model_len=128)
        assert np.array_equal(chunked.predict(ids), logits)


def test_what_native_does_not_serve_falls_back_to_torch(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    path = save(make_model("gemma2"))
    assert ModelRunner(path, resolve({}).config).backend.name == "torch"
    said = [record.getMessage() for record in caplog.records]
    assert any("no kernel with a softcap" in line and "torch backend serves it" in line for line in said)
    with pytest.raises(ProgramError, match="no kernel with a softcap"):
        ModelRunner(path, resolve({"backend": "native"}).config)


@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen2"])
def test_native_serves_close_relatives(family: str, save: Save) -> None:
    model = make_model(family)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 40)).tolist()
    exact, error = oracle(model, ids)
    settings = {"backend": "native", "kv_dtype": "f32", "max_num_seqs": 64}
    runner = ModelRunner(save(model), resolve(settings).config)
    assert np.abs(runner.predict(ids) - exact).max() <= 32 * error
