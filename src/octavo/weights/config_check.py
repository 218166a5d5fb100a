"""The hyperparameters that only some families read, checked before a model file reads them.

Rule: what is there has the kind and the range that its readers expect, and what is missing is an error that
names it. What every model has is checked where it is read, by `hf_config` or `gguf_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import Checkpoint

#: Far beyond any model, and few enough to count up to.
_MOST = 1 << 16
_LARGEST = 1e30
_COUNTS = {  # name -> (least, most)
    "head_dim": (1, _MOST),
    "rotary_dim": (1, _MOST),
    "num_local_experts": (0, _MOST),
    "num_experts_per_tok": (0, _MOST),
    "moe_intermediate_size": (0, 2**31 - 1),
    "sliding_window": (0, 2**31 - 1),
    "sliding_window_pattern": (1, 2**31 - 1),
    "decoder_sparse_step": (1, 2**31 - 1),
    "max_window_layers": (0, 2**31 - 1),
}
_POSITIVE = (
    "residual_multiplier",
    "embedding_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_FLAGS = ("attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window")
_NAMES = ("hidden_act", "hidden_activation")


class CheckedConfig(dict[str, Any]):
    """A config in which looking up a key that is missing is a CheckpointError."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        super().__init__(values)
        self._where, self._prefix = where, prefix

    def __missing__(self, key: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Raise CheckpointError for a key's value."""
        value = str(self[key])[:200]
        raise CheckpointError(f"{self._where}: {self._prefix}{key} is {value!r}; only {wanted} makes sense")


def checked_config(checkpoint: Checkpoint) -> CheckedConfig:
    """A checkpoint's config, with optional keys of the right kind; CheckpointError where they are not.

    A key whose value is None is left out: that is how configs say that there is no such thing.
    """
    path = checkpoint.path
    where = str(path / "config.json" if path.is_dir() else path)
    config = CheckedConfig({k: v for k, v in checkpoint.config.items() if v is not None}, where)
    for key in filter(config.__contains__, _COUNTS):
        _check_count(config, key, *_COUNTS[key])
    for key in filter(config.__contains__, _POSITIVE):
        value = config[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 1 / _LARGEST < value < _LARGEST:
            config.refuse(key, "a number above 0")
    for key in filter(config.__contains__, _FLAGS):
        if not isinstance(config[key], bool):
            config.refuse(key, "true or false")
    for key in filter(config.__contains__, _NAMES):
        if not isinstance(config[key], str):
            config.refuse(key, "a name")
    if config["rotary_dim"] > config["head_dim"]:
        raise CheckpointError(
            f"{where}: {config['rotary_dim']} elements of heads of {config['head_dim']} are to be rotated "
            "(partial_rotary_factor; in GGUF, rope.dimension_count); only as many as there are makes sense"
        )
    heads = config["num_attention_heads"]
    if heads % config["num_key_value_heads"]:
        config.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {heads},")
    _check_layers(config)
    rope = CheckedConfig(config["rope_parameters"], where, "rope_parameters.")
    for key in ("full_attention", "sliding_attention"):
        if not isinstance(rope.get(key, {}), dict):
            rope.refuse(key, "an object")
    return CheckedConfig({**config, "rope_parameters": rope}, where)


def _check_layers(config: CheckedConfig) -> None:
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(isinstance(kind, str) for kind in kinds)
    ):
        config.refuse("layer_types", f"a list of {layers} names")
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        config.refuse("mlp_only_layers", "a list of layers")


def _check_count(config: CheckedConfig, key: str, least: int, most: int) -> None:
    if type(config[key]) is not int or not least <= config[key] <= most:
        config.refuse(key, f"a whole number in {least}..{most}")
