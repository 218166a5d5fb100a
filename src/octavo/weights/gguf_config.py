"""What a GGUF file's metadata say of a model, under Hugging Face's keys.

Rule: metadata are believed only as far as they make sense, and the error says which key does not. What
GGUF leaves to the architecture's name (Gemma's windows, say) is written out here; what would change the
answers and is not served is refused by its key. Source: llama.cpp's converter, which wrote the file, and
what llama.cpp assumes where a key is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.gguf import GGUFFile

#: Tensors that say how to rotate; the config holds what they say.
ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"})
_MOST_HEAD_DIM = 1 << 16
_MOST_EXPERTS = 1 << 16
_MOST_POSITIONS = 1 << 24
#: Keys that change what a model computes, and the values that leave it as it is served here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # unset, softmax
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
}

Config = dict[str, Any]


class _Metadata:
    """One architecture's keys, each checked when it is read."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value; CheckpointError if it is missing and there is no default."""
        full = f"{self.architecture}.{key}"
        if default is None and full not in self.file.metadata:
            raise CheckpointError(f"{self.file.path.name}: metadata {full!r} is missing")
        return self.file.metadata.get(full, default)

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number from `least` to `most`."""
        value = self._of_all_layers(key, self.get(key, default))
        if type(value) is not int or not least <= value <= most:
            limit = "" if most == 2**31 - 1 else f" and at most {most}"
            self.refuse(key, value, f"a number of at least {least}{limit}")
        return value

    def above(self, key: str, default: float | None = None, *, least: int = 0) -> float:
        """A number above `least`."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not least < value < math.inf:
            self.refuse(key, value, f"a number above {least}")
        return float(value)

    def cap(self, key: str, default: float) -> float | None:
        """A number above 0, or 0 for none."""
        return None if self.get(key, default) == 0 else self.above(key, default)

    def refuse(self, key: str, value: object, wanted: str) -> NoReturn:
        """Raise CheckpointError for a value that can't be."""
        raise CheckpointError(f"{self._shown(key, value)}; only {wanted} makes sense")

    def not_served(self, key: str, value: object, what: str) -> UnsupportedModelError:
        """The error for a value that asks for what is not served."""
        return UnsupportedModelError(f"{self._shown(key, value)}: {what} is not served")

    def _shown(self, key: str, value: object) -> str:
        return f"{self.file.path.name}: metadata {self.architecture}.{key} is {repr(value)[:200]}"

    def _of_all_layers(self, key: str, value: Any) -> Any:
        """The value of a key that may be an array, a number for each layer."""
        if not isinstance(value, list) or not value:
            return value
        if any(each != value[0] for each in value):
            raise self.not_served(key, value, "a number that differs between layers")
        return value[0]


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's name at Hugging Face, and the config that it has besides everybody's.

    window: the default of the sliding window, 0 for none; None where none is served. pattern: of how many
    layers the last sees everything; 0 where all have the window.
    """

    model_type: str
    config: Callable[[_Metadata, Config], Config]
    window: int | None = None
    pattern: int = 0


def family_of(file: GGUFFile) -> str:
    """The model_type of a file; the architecture's own name where it is not read."""
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of {str(parts)[:200]} parts of a model, which are not read; join them "
            "with llama.cpp's llama-gguf-split --merge"
        )
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path.name}: metadata 'general.architecture' is missing or no name")
    if name == "llama":  # Mistral and Mixtral go by this name
        metadata = _Metadata(file, name)
        if metadata.count("expert_count", 0, least=0):
            return "mixtral"
        return "mistral" if metadata.count("attention.sliding_window", 0, least=0) else "llama"
    return _FAMILIES[name].model_type if name in _FAMILIES else name


def config_of(file: GGUFFile) -> Config:
    """Hyperparameters under Hugging Face's keys. CheckpointError names a key that is missing or makes no
    sense, UnsupportedModelError one that asks for what is not served."""
    architecture = file.metadata["general.architecture"]
    if architecture not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path.name}: GGUF files of {architecture!r} are not read yet, only those of "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    family, metadata = _FAMILIES[architecture], _Metadata(file, architecture)
    for key, values in _NEUTRAL.items():
        if metadata.has(key) and metadata.get(key) not in values:
            raise metadata.not_served(key, metadata.get(key), f"anything but {values[-1]}")
    config: Config = {"model_type": family_of(file)} | _sizes(metadata)
    config |= _windows(metadata, family, config)
    config["rope_parameters"] = _rope(metadata, config)
    return config | family.config(metadata, config)


def _sizes(metadata: _Metadata) -> Config:
    tensors = metadata.file.tensors
    heads = metadata.count("attention.head_count")
    hidden = metadata.count("embedding_length")
    head_dim = metadata.count("attention.key_length", max(hidden // heads, 1), most=_MOST_HEAD_DIM)
    value_dim = metadata.count("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.not_served(
            "attention.value_length", value_dim, f"another length than the keys' {head_dim}"
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{metadata.file.path.name}: tensor 'token_embd.weight' is missing")
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        # A layer has several tensors; counts beyond would cost time and memory before one is missed.
        "num_hidden_layers": metadata.count("block_count", most=len(tensors)),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rotary_dim": metadata.count("rope.dimension_count", head_dim, most=head_dim),
        "rms_norm_eps": metadata.above("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length", most=_MOST_POSITIONS),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


# -- windows --------------------------------------------------------------------------------------


def _windows(metadata: _Metadata, family: _Family, config: Config) -> Config:
    """sliding_window, and the kind of each layer."""
    key = "attention.sliding_window"
    window = metadata.count(key, family.window or 0, least=0)
    if not 0 < window < config["max_position_embeddings"]:
        return {"sliding_window": None, "layer_types": None}
    if family.window is None:
        raise metadata.not_served(key, window, f"a sliding window in {metadata.architecture!r} models")
    windowed = _pattern(metadata, family.pattern, config["num_hidden_layers"])
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    return {"sliding_window": window, "layer_types": kinds}


def _pattern(metadata: _Metadata, default: int, layers: int) -> list[bool]:
    """Which layers have the window: from a list of flags, or the distance of those that have not."""
    key = "attention.sliding_window_pattern"
    value = metadata.get(key, default)
    if isinstance(value, list):
        if len(value) < layers or any(type(each) is not bool for each in value):
            metadata.refuse(key, value, f"a list of {layers} booleans, or a number,")
        return value[:layers]
    every = metadata.count(key, default, least=0)
    return [every == 0 or (layer + 1) % every != 0 for layer in range(layers)]


# -- rotation -------------------------------------------------------------------------------------


def _rope(metadata: _Metadata, config: Config) -> Config:
    """The rope parameters, of all layers or of those that see everything."""
    rope: Config = {"rope_theta": metadata.above("rope.freq_base", 10000.0, least=1)}
    kind = _rope_kind(metadata)
    tensors = ROPE_TENSORS & metadata.file.tensors.keys()
    if "rope_freqs.weight" in tensors:
        if kind != "none" or len(tensors) > 1:
            raise metadata.not_served("rope.scaling.type", kind, "this beside rope_freqs.weight")
        # Llama 3 stretches each pair by a factor of its own, always the same: a longrope that never
        # comes to its long factors.
        factors = _factors(metadata, "rope_freqs.weight", config)
        stretch = _longrope(factors, factors, config["max_position_embeddings"])
        return rope | stretch | {"attention_factor": 1.0}
    if tensors or kind == "longrope":
        if kind not in ("longrope", "none"):
            raise metadata.not_served("rope.scaling.type", kind, "this beside rope factors")
        return rope | _longrope_of(metadata, config)
    if kind == "none":
        return rope | {"rope_type": "default"}
    if kind == "linear":
        key = "rope.scale_linear" if metadata.has("rope.scale_linear") else "rope.scaling.factor"
        return rope | {"rope_type": "linear", "factor": metadata.above(key)}
    if kind == "yarn":
        return rope | _yarn(metadata)
    raise metadata.not_served("rope.scaling.type", kind, "any but none, linear, yarn and longrope")


def _rope_kind(metadata: _Metadata) -> str:
    """The type of scaling; old files give a factor without one."""
    scaled = metadata.has("rope.scaling.factor") or metadata.has("rope.scale_linear")
    kind = metadata.get("rope.scaling.type", "linear" if scaled else "none")
    if not isinstance(kind, str):
        metadata.refuse("rope.scaling.type", kind, "a name")
    return kind


def _yarn(metadata: _Metadata) -> Config:
    besides = metadata.get("rope.scaling.attn_factor", 1.0)
    if besides != 1:
        raise metadata.not_served("rope.scaling.attn_factor", besides, "a factor besides yarn's own")
    rope: Config = {
        "rope_type": "yarn",
        "factor": metadata.above("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
    }
    for key, ours in (
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if metadata.has(f"rope.scaling.{key}"):
            rope[ours] = metadata.above(f"rope.scaling.{key}")
    scale_of_all = metadata.cap("rope.scaling.yarn_log_multiplier", 0.0)
    if scale_of_all is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": scale_of_all}
    return rope


def _longrope_of(metadata: _Metadata, config: Config) -> Config:
    short, long = (_factors(metadata, f"rope_factors_{kind}.weight", config) for kind in ("short", "long"))
    rope = _longrope(short, long, metadata.count("rope.scaling.original_context_length", least=2))
    if metadata.has("rope.scaling.attn_factor"):
        rope["attention_factor"] = metadata.above("rope.scaling.attn_factor")
    return rope


def _longrope(short: list[float], long: list[float], original: int) -> Config:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


def _factors(metadata: _Metadata, name: str, config: Config) -> list[float]:
    """A tensor of factors, one for each pair of elements that are rotated."""
    name_of_file, pairs = metadata.file.path.name, config["rotary_dim"] // 2
    info = metadata.file.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{name_of_file}: tensor {name!r} is missing")
    if info.shape != (pairs,) or info.type_name != "F32":
        raise CheckpointError(
            f"{name_of_file}: tensor {name!r} is {info.type_name} {list(info.shape)}; only F32 [{pairs}], a "
            "factor for each rotated pair, makes sense"
        )
    factors = metadata.file.dequantize(name)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{name_of_file}: tensor {name!r} has factors that are not above 0")
    return [float(factor) for factor in factors]


# -- families -------------------------------------------------------------------------------------


def _nothing(metadata: _Metadata, config: Config) -> Config:
    return {}


def _experts(metadata: _Metadata) -> Config:
    experts = metadata.count("expert_count", most=_MOST_EXPERTS)
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.count("expert_used_count", most=experts),
    }


def _llama(metadata: _Metadata, config: Config) -> Config:
    return _experts(metadata) if config["model_type"] == "mixtral" else {}


def _qwen3_moe(metadata: _Metadata, config: Config) -> Config:
    width = metadata.count("expert_feed_forward_length")
    return {**_experts(metadata), "moe_intermediate_size": width, "norm_topk_prob": True}


def _gpt_oss(metadata: _Metadata, config: Config) -> Config:
    """Windows are not left to a default, and yarn's range is not rounded, as the published configs say."""
    metadata.count("attention.sliding_window")
    return {
        **_experts(metadata),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


def _smollm3(metadata: _Metadata, config: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def _granite(metadata: _Metadata, config: Config) -> Config:
    if not metadata.get("rope.scaling.finetuned", True):
        raise metadata.not_served("rope.scaling.finetuned", False, "attention without rotation")
    return {
        "embedding_multiplier": metadata.above("embedding_scale", 1.0),
        "residual_multiplier": metadata.above("residual_scale", 1.0),
        "attention_multiplier": metadata.above("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": metadata.above("logit_scale"),
    }


def _gemma(config: Config, layers_27b: int) -> Config:
    """What Gemma 2 and 3 share. The converter added their norms' 1; only their 27B divides scores by
    another root than that of a head's size, which no key says."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == layers_27b:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "norm_offset": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
    }


def _gemma2(metadata: _Metadata, config: Config) -> Config:
    return {
        **_gemma(config, layers_27b=46),
        "attn_logit_softcapping": metadata.cap("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.cap("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: _Metadata, config: Config) -> Config:
    local = {"rope_type": "default", "rope_theta": metadata.above("rope.freq_base_swa", 10000.0, least=1)}
    return {
        **_gemma(config, layers_27b=62),
        "final_logit_softcapping": metadata.cap("final_logit_softcapping", 0.0),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


_FAMILIES = {
    "llama": _Family("llama", _llama, window=0),
    "qwen2": _Family("qwen2", _nothing),
    "qwen3": _Family("qwen3", _nothing),
    "qwen3moe": _Family("qwen3_moe", _qwen3_moe),
    "gpt-oss": _Family("gpt_oss", _gpt_oss, window=0, pattern=2),
    "smollm3": _Family("smollm3", _smollm3),
    "phi3": _Family("phi3", _nothing, window=0),
    "granite": _Family("granite", _granite),
    "olmo2": _Family("olmo2", _nothing),
    "gemma2": _Family("gemma2", _gemma2, window=4096, pattern=2),
    "gemma3": _Family("gemma3_text", _gemma3, window=0, pattern=6),
}
