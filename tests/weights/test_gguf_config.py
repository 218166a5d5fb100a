"""What GGUF's metadata say, family by family: the defaults that GGUF leaves unsaid, rope scaling, windows,
and each way of being damaged or not served. What the families then compute is tests/models' business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from test_checkpoint import write

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.gguf_checkpoint import GGUFCheckpoint

ORIGINAL = "rope.scaling.original_context_length"
LONG = {"context_length": 8192}
FACTORS = np.linspace(1, 3, 8, dtype=np.float32)
LONGROPE = {"rope_factors_short.weight": FACTORS, "rope_factors_long.weight": 2 * FACTORS}
YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    ORIGINAL: 32,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
MOE = EXPERTS | {"expert_feed_forward_length": 48}
GRANITE = {"logit_scale": 8.0}
WINDOW = {"attention.sliding_window": 64}
#: Metadata that an architecture can't be without.
REQUIRED: dict[str, dict[str, Any]] = {"qwen3moe": MOE, "granite": GRANITE, "gpt-oss": MOE | WINDOW}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes its file."""
    return tmp_path / "tiny.gguf"


def config_of(
    path: Path,
    architecture: str = "llama",
    layers: int = 1,
    extra: dict[str, Any] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """The config of a file with these metadata, in which there is a tensor for each layer."""
    fillers = {f"filler.{layer}": np.ones(1, np.float32) for layer in range(layers)}
    metadata = {"block_count": layers} | REQUIRED.get(architecture, {}) | metadata
    return write(path, architecture=architecture, metadata=metadata, extra=fillers | (extra or {})).config


@pytest.mark.parametrize(
    ("architecture", "metadata", "model_type"),
    [
        ("llama", {}, "llama"),
        ("llama", EXPERTS, "mixtral"),
        ("llama", WINDOW, "mistral"),
        ("llama", {"expert_count": 0, "attention.sliding_window": 0}, "llama"),
        ("qwen2", {}, "qwen2"),
        ("qwen3", {}, "qwen3"),
        ("qwen3moe", {}, "qwen3_moe"),
        ("smollm3", {}, "smollm3"),
        ("gpt-oss", {}, "gpt_oss"),
        ("phi3", {}, "phi3"),
        ("granite", {}, "granite"),
        ("olmo2", {}, "olmo2"),
        ("gemma2", {}, "gemma2"),
        ("gemma3", {}, "gemma3_text"),
    ],
)
def test_families(path: Path, architecture: str, metadata: dict[str, Any], model_type: str) -> None:
    checkpoint = write(path, architecture=architecture, metadata=REQUIRED.get(architecture, {}) | metadata)
    assert checkpoint.architecture == checkpoint.config["model_type"] == model_type


def test_architectures_that_are_not_read_are_named(path: Path) -> None:
    checkpoint = write(path, architecture="mistral")  # Hugging Face's name is not GGUF's
    with pytest.raises(
        UnsupportedModelError, match=r"GGUF files of 'mistral' are not read yet, only .*gemma2"
    ):
        _ = checkpoint.config


# -- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            YARN
            | {
                "rope.scaling.yarn_attn_factor": 1.5,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_ext_factor": 1.0,
                "rope.scaling.attn_factor": 1.0,
                "rope.scaling.yarn_log_multiplier": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            },
        ),
    ],
)
def test_rope_scaling(path: Path, metadata: dict[str, Any], rope: dict[str, Any]) -> None:
    found = config_of(path, **metadata)["rope_parameters"]
    assert found == {"rope_theta": 10000.0} | rope


def test_llama_3s_factors_are_for_all_positions(path: Path) -> None:
    """A longrope whose original context is the model's own."""
    rope = config_of(path, extra={"rope_freqs.weight": FACTORS})["rope_parameters"]
    factors = FACTORS.tolist()
    assert rope["rope_type"] == "longrope"
    assert rope["short_factor"] == rope["long_factor"] == factors
    assert rope["original_max_position_embeddings"] == 128
    assert rope["attention_factor"] == 1.0


@pytest.mark.parametrize("kind", [None, "longrope"])
def test_longrope(path: Path, kind: str | None) -> None:
    """Files of Phi-3 say so by their tensors alone."""
    metadata: dict[str, Any] = {"rope.scaling.type": kind, ORIGINAL: 32}
    rope = config_of(path, "phi3", extra=LONGROPE, **metadata)["rope_parameters"]
    assert rope == {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "short_factor": FACTORS.tolist(),
        "long_factor": (2 * FACTORS).tolist(),
        "original_max_position_embeddings": 32,
    }
    metadata["rope.scaling.attn_factor"] = 1.25
    rope = config_of(path, "phi3", extra=LONGROPE, **metadata)["rope_parameters"]
    assert rope["attention_factor"] == 1.25


@pytest.mark.parametrize("original", [0, 1, -32, "32"])
def test_longrope_of_an_impossible_context(path: Path, original: object) -> None:
    with pytest.raises(CheckpointError, match=rf"phi3\.{ORIGINAL} is .* at least 2 makes sense"):
        config_of(path, "phi3", extra=LONGROPE, **{ORIGINAL: original})


def test_factors_belong_to_the_config(path: Path) -> None:
    """They count as used: nothing is raised."""
    checkpoint = write(path, extra={"rope_freqs.weight": FACTORS})
    left = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkv"]
    checkpoint.check_all_used(["model.embed_tokens.weight", *left])
    assert checkpoint.config["rope_parameters"]["rope_type"] != "default"


def test_yarn_of_gpt_oss_is_not_rounded(path: Path) -> None:
    assert config_of(path, "gpt-oss", **YARN)["rope_parameters"]["truncate"] is False


def test_gemma_3_has_two_ropes(path: Path) -> None:
    metadata = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    ropes = config_of(path, "gemma3", **metadata)["rope_parameters"]
    assert ropes == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    ropes = config_of(path, "gemma3", **{"rope.freq_base_swa": 5e4})["rope_parameters"]
    assert ropes["sliding_attention"]["rope_theta"] == 5e4


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "metadata", "window", "windowed"),
    [
        ("gemma2", {}, 4096, [True, False] * 3 + [True]),
        ("gemma2", WINDOW, 64, [True, False] * 3 + [True]),
        ("gemma3", WINDOW, 64, [True] * 5 + [False, True]),
        ("gpt-oss", WINDOW, 64, [True, False] * 3 + [True]),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": 3}, 64, [True, True, False] * 2 + [True]),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": [True, False] * 4}, 64,
         [True, False] * 3 + [True]),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": 0}, 64, [True] * 7),
        ("llama", WINDOW, 64, [True] * 7),
        ("phi3", WINDOW, 64, [True] * 7),
        ("gemma3", {}, None, None),
        ("phi3", {"attention.sliding_window": 0}, None, None),
        ("phi3", {"attention.sliding_window": 8192}, None, None),  # of the context's size
        ("qwen3", {"attention.sliding_window": 9000}, None, None),
    ],
)  # fmt: skip
def test_windows(
    path: Path, architecture: str, metadata: dict[str, Any], window: int | None, windowed: list[bool] | None
) -> None:
    config = config_of(path, architecture, layers=7, **LONG, **metadata)
    assert config["sliding_window"] == window
    kinds = None if windowed is None else [("full", "sliding")[each] + "_attention" for each in windowed]
    assert config["layer_types"] == kinds


# -- what families have of their own -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"),
    [("gemma2", 1, 16), ("gemma2", 46, 32), ("gemma2", 62, 16), ("gemma3", 46, 16), ("gemma3", 62, 32)],
)
def test_gemmas_of_27b_divide_scores_by_another_root(
    path: Path, architecture: str, layers: int, scalar: int
) -> None:
    sizes = {"embedding_length": 64, "attention.head_count": 2, "attention.key_length": 16}
    assert config_of(path, architecture, layers=layers, **sizes)["query_pre_attn_scalar"] == scalar


def test_soft_caps(path: Path) -> None:
    def caps(architecture: str, **metadata: Any) -> tuple[float | None, float | None]:
        config = config_of(path, architecture, **metadata)
        return config.get("attn_logit_softcapping"), config.get("final_logit_softcapping")

    assert caps("gemma2") == (50.0, 30.0)
    assert caps("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=0.0) == (20.0, None)
    assert caps("gemma3") == (None, None)
    assert caps("gemma3", final_logit_softcapping=25.0) == (None, 25.0)


def test_scales_of_granite(path: Path) -> None:
    keys = ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
    config = config_of(path, "granite")
    assert [config[key] for key in keys] == [1.0, 1.0, 0.25, 8.0]
    scales = {"embedding_scale": 12.0, "residual_scale": 0.5, "attention.scale": 0.125}
    config = config_of(path, "granite", **scales)
    assert [config[key] for key in keys] == [12.0, 0.5, 0.125, 8.0]


def test_biases_are_seen_in_the_tensors(path: Path) -> None:
    assert config_of(path, extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})["attention_bias"]


@pytest.mark.parametrize("key", ["attention.head_count_kv", "feed_forward_length", "attention.head_count"])
def test_numbers_of_each_layer(path: Path, key: str) -> None:
    assert config_of(path, layers=3, **{key: [4, 4, 4]}) == config_of(path, layers=3, **{key: 4})
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key} is \[4, 4, 2\]: a number that differs"):
        config_of(path, layers=3, **{key: [4, 4, 2]})


# -- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "metadata"),
    [
        ("llama", {"expert_count": -1}),
        ("llama", {"expert_count": "many"}),
        ("llama", EXPERTS | {"expert_count": 1 << 17}),
        ("llama", EXPERTS | {"expert_used_count": 5}),
        ("llama", EXPERTS | {"expert_used_count": 0}),
        ("llama", {"attention.sliding_window": -1}),
        ("llama", {"attention.sliding_window": 1.5}),
        ("llama", {"attention.value_length": 0}),
        ("llama", {"attention.key_length": 1 << 17}),
        ("llama", {"block_count": 1000}),
        ("llama", {"context_length": 1 << 25}),
        ("llama", {"rope.dimension_count": 32}),
        ("llama", {"rope.freq_base": 1.0}),
        ("llama", {"rope.scaling.type": 1}),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}),
        ("llama", {"rope.scale_linear": -2.0}),
        ("llama", YARN | {"rope.scaling.factor": "4"}),
        ("llama", YARN | {ORIGINAL: 0}),
        ("llama", YARN | {"rope.scaling.yarn_attn_factor": 0.0}),
        ("llama", YARN | {"rope.scaling.yarn_beta_fast": float("nan")}),
        ("llama", YARN | {"rope.scaling.yarn_beta_slow": -1.0}),
        ("llama", YARN | {"rope.scaling.yarn_log_multiplier": -1.0}),
        ("qwen3moe", {"expert_count": 0}),
        ("qwen3moe", {"expert_feed_forward_length": 0}),
        ("granite", {"logit_scale": 0.0}),
        ("granite", {"embedding_scale": float("inf")}),
        ("granite", {"residual_scale": -1.0}),
        ("granite", {"attention.scale": "x"}),
        ("gemma2", {"attn_logit_softcapping": -1.0}),
        ("gemma2", {"final_logit_softcapping": "x"}),
        ("gemma3", {"rope.freq_base_swa": 0.0}),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": [1]}),
        ("gemma3", WINDOW | {"attention.sliding_window_pattern": -1}),
    ],
)  # fmt: skip
def test_nonsense_is_named_by_its_key(path: Path, architecture: str, metadata: dict[str, Any]) -> None:
    key = next(reversed(metadata))
    if metadata.keys() in (EXPERTS.keys(), YARN.keys()):  # one of them was replaced
        plain = EXPERTS | YARN
        key = next(key for key in metadata if metadata[key] != plain[key])
    with pytest.raises(CheckpointError, match=rf"metadata {architecture}\.{key} is .*only .* makes sense"):
        config_of(path, architecture, **metadata)


@pytest.mark.parametrize(
    ("architecture", "metadata", "key"),
    [
        ("llama", {"expert_count": 4}, "expert_used_count"),
        ("llama", {"rope.scaling.type": "linear"}, "rope.scaling.factor"),
        ("llama", YARN | {"rope.scaling.factor": None}, "rope.scaling.factor"),
        ("llama", YARN | {ORIGINAL: None}, ORIGINAL),
        ("qwen3moe", {"expert_count": None}, "expert_count"),
        ("qwen3moe", {"expert_feed_forward_length": None}, "expert_feed_forward_length"),
        ("granite", {"logit_scale": None}, "logit_scale"),
        ("gpt-oss", {"attention.sliding_window": None}, "attention.sliding_window"),
        ("gpt-oss", {"expert_feed_forward_length": None}, "expert_feed_forward_length"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(path: Path, architecture: str, metadata: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"metadata '{architecture}\.{key}' is missing"):
        config_of(path, architecture, **metadata)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {"attention.value_length": 32}, r"attention\.value_length is 32: another length than"),
        ("llama", {"attention.causal": False}, r"attention\.causal is False: anything but True"),
        ("llama", {"rope.scaling.type": "spiral"}, r"is 'spiral': any but none, linear, yarn and longrope"),
        ("llama", YARN | {"rope.scaling.attn_factor": 2.0}, r"attn_factor is 2\.0: a factor besides yarn's"),
        ("llama", YARN | {"rope.scaling.yarn_ext_factor": 0.5}, r"ext_factor is 0\.5: anything but 1\.0"),
        ("llama", EXPERTS | {"expert_weights_scale": 2.5}, r"weights_scale is 2\.5: anything but 1\.0"),
        ("qwen3moe", {"expert_gating_func": 2}, r"expert_gating_func is 2: anything but 1"),
        ("qwen3moe", {"expert_weights_norm": False}, r"expert_weights_norm is False: anything but True"),
        ("qwen2", WINDOW, r"is 64: a sliding window in 'qwen2' models"),
        ("olmo2", WINDOW, r"is 64: a sliding window in 'olmo2' models"),
        ("granite", {"rope.scaling.finetuned": False}, r"finetuned is False: attention without rotation"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(
    path: Path, architecture: str, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_of(path, architecture, **metadata)


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope"])
def test_two_stretches_are_refused(path: Path, kind: str) -> None:
    metadata = YARN | {"rope.scaling.type": kind}
    with pytest.raises(UnsupportedModelError, match=rf"type is '{kind}': this beside rope_freqs\.weight"):
        config_of(path, extra={"rope_freqs.weight": FACTORS}, **metadata)
    if kind != "longrope":
        with pytest.raises(UnsupportedModelError, match=rf"type is '{kind}': this beside rope factors"):
            config_of(path, extra=LONGROPE, **metadata)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("rope_freqs.weight", FACTORS[:4], r"is F32 \[4\]; only F32 \[8\], a factor for each rotated pair"),
        ("rope_freqs.weight", FACTORS.astype(np.float16), r"is F16 \[8\]; only F32 \[8\]"),
        ("rope_freqs.weight", FACTORS * 0, r"factors that are not above 0"),
        ("rope_freqs.weight", FACTORS * np.nan, r"factors that are not above 0"),
        ("rope_factors_long.weight", FACTORS, r"tensor 'rope_factors_short\.weight' is missing"),
        ("rope_factors_short.weight", FACTORS, r"tensor 'rope_factors_long\.weight' is missing"),
    ],
)
def test_damaged_factors(path: Path, name: str, values: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(path, "phi3", extra={name: values}, **{ORIGINAL: 32})


def test_parts_of_a_model_are_refused(path: Path) -> None:
    """llama.cpp's gguf-split leaves the metadata to the first of them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf is one of 3 parts .*gguf-split --merge"):
        GGUFCheckpoint(path)
