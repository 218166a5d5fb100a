"""Every setting of the engine, once.

CLI flags, environment names and the reference page are made from this schema. Rule: a config is
frozen; nobody edits one after `resolve`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

BACKENDS = ("auto", "native", "torch")
DTYPES = ("auto", "bf16", "f16", "f32")
#: Bits of the activations that meet weights of 4 bits: in attention's projections, in feed-forwards.
ACTIVATION_BITS = {"16": (16, 16), "8": (8, 8), "mixed": (16, 8)}
QUANTIZATIONS = ("none", "int8", "int4")
KV_DTYPES = ("auto", "f16", "bf16", "f32")
POLICIES = ("fcfs", "priority")


def setting(default: Any, help_: str) -> Any:
    """A field with its one-line help."""
    return dataclasses.field(default=default, metadata={"help": help_})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and served. 0 and "auto" mean: decide from the model and the machine."""

    model: str = setting(
        "smollm2-135m-instruct",
        "Catalog name, .gguf file, Hugging Face directory, or hub id: org/name, modelscope:org/name.",
    )
    backend: str = setting("auto", "native (C++), torch (reference), or auto: native where it was built.")
    dtype: str = setting(
        "auto", "Weights that are not quantised: bf16, f16, f32, or auto: as they are stored."
    )
    quantization: str = setting(
        "none", "Quantise weights that are stored plain, as they are loaded: int8, int4, or none."
    )
    kv_dtype: str = setting("auto", "Element type of the KV cache: f16, bf16, f32, or auto: f16 on native.")
    activation_bits: str = setting(
        "mixed", "Activations where weights have 4 bits: 16, 8 (fastest, roughest), mixed: 8 in feed-forward."
    )
    max_model_len: int = setting(0, "Longest sequence, prompt and output; 0: what the model was trained for.")
    pre_tokenizer: str = setting(
        "", "How a GGUF model's text is cut into words, such as llama-bpe; empty: as the file says."
    )
    chat_template: str = setting("", "File with a Jinja chat template; empty: the model's own.")
    max_num_seqs: int = setting(32, "Most requests that run at once.")
    max_num_batched_tokens: int = setting(512, "Most tokens computed in one step.")
    kv_cache_gib: float = setting(0.0, "Memory for KV blocks; 0: a quarter of what is free, at most 4 GiB.")
    prefix_caching: bool = setting(True, "Keep KV blocks of finished requests and reuse them.")
    policy: str = setting("fcfs", "fcfs: first come, first served. priority: smaller priority first.")
    threads: int = setting(0, "Threads of the CPU backends; 0: as many as the machine or its quota allows.")
    api_workers: int = setting(1, "Front-end processes that take requests before the engine's own process.")
    cache_dir: str = setting("", "Where models are kept; empty: octavo under the user's cache directory.")
    offline: bool = setting(False, "Fetch nothing: models come from this machine or not at all.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _of_kind(field.name, getattr(self, field.name), type(field.default))
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        _one_of("policy", self.policy, POLICIES)
        _one_of("activation_bits", self.activation_bits, tuple(ACTIVATION_BITS))
        for name, low in (
            ("max_model_len", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("kv_cache_gib", 0),
            ("threads", 0),
            ("api_workers", 1),
        ):
            value = getattr(self, name)
            if not low <= value < 2**31:
                raise ConfigError(f"{name} is {value}; it must be at least {low}, and less than 2**31")
        if not self.model:
            raise ConfigError("model is empty; give a catalog name, a .gguf file, a directory or a hub id")

    @property
    def cache_path(self) -> Path:
        """Where models are kept."""
        return Path(self.cache_dir).expanduser()


def _of_kind(name: str, value: Any, kind: type) -> None:
    """Annotations promise a type; whoever calls from Python may break the promise."""
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}, which is no {kind.__name__}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
