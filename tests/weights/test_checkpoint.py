"""Checkpoints: what a GGUF file says, under Hugging Face's names, or why it can't be served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.formats import Format
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.gguf_checkpoint import GGUFCheckpoint

LAYER = "model.layers.0"
Q, K, V = (f"{LAYER}.self_attn.{p}_proj.weight" for p in "qkv")

METADATA: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
ROWS = {"token_embd": 50, "blk.0.attn_q": 64, "blk.0.attn_k": 32, "blk.0.attn_v": 32}

Matrix = npt.NDArray[np.float32]


def matrix(name: str) -> Matrix:
    rng = np.random.default_rng(sum(map(ord, name)))
    return rng.normal(size=(ROWS[name], 64)).astype(np.float32)


def write(
    path: Path,
    *,
    metadata: dict[str, Any] | None = None,
    types: dict[str, str] | None = None,
    extra: dict[str, Matrix] | None = None,
    without: tuple[str, ...] = (),
    architecture: str = "llama",
) -> Checkpoint:
    """A file of four matrices. metadata: values to add or, where None, to leave out."""
    path.unlink(missing_ok=True)  # a file that is mapped must not change
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (METADATA | (metadata or {})).items():
        full = f"{architecture}.{key}"
        adders: dict[type, Callable[[str, Any], None]] = {
            int: writer.add_uint32 if not isinstance(value, int) or value >= 0 else writer.add_int32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
            bool: writer.add_bool,
        }
        if value is not None:
            adders[type(value)](full, value)
    for name in ROWS:
        if name not in without:
            kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
            raw = quantize(matrix(name), kind)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFCheckpoint(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test writes its file."""
    return tmp_path / "tiny.gguf"


def test_config(path: Path) -> None:
    assert write(path, metadata={"rope.freq_base": 1e5, "attention.key_length": 32}).config == {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 32,
        "rms_norm_eps": float(np.float32(1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "max_position_embeddings": 128,
        "vocab_size": 50,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": None,
        "layer_types": None,
    }


def test_what_config_leaves_out_has_defaults(path: Path) -> None:
    config = write(path, metadata={"attention.head_count_kv": None}).config
    assert config["num_key_value_heads"] == 4
    assert config["head_dim"] == config["rotary_dim"] == 16
    assert config["rope_parameters"]["rope_theta"] == 10000.0


def test_an_output_matrix_is_an_untied_head(path: Path) -> None:
    checkpoint = write(path, extra={"output.weight": matrix("token_embd")})
    assert not checkpoint.config["tie_word_embeddings"]
    assert checkpoint.has("lm_head.weight")


@pytest.mark.parametrize("key", [k for k in METADATA if k != "attention.head_count_kv"])
def test_missing_metadata_is_named(path: Path, key: str) -> None:
    checkpoint = write(path, metadata={key: None})
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: metadata 'llama\.{key}' is missing"):
        _ = checkpoint.config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count_kv", 0),
        ("attention.head_count_kv", [0]),
        ("attention.head_count", "four"),
        ("embedding_length", 0),
        ("block_count", 0),
        ("block_count", 1.5),
        ("feed_forward_length", -96),
        ("context_length", 2**31),
        ("attention.key_length", 0),
        ("attention.key_length", True),
        ("rope.dimension_count", 0),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", -10000.0),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", "1e4"),
    ],
)
def test_impossible_metadata_is_named(path: Path, key: str, value: object) -> None:
    checkpoint = write(path, metadata={key: value})
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: metadata llama\.{key} is .* makes sense"):
        _ = checkpoint.config


def test_an_architecture_is_known_before_its_metadata(path: Path) -> None:
    checkpoint = write(path, architecture="mamba", metadata=dict.fromkeys(METADATA))
    assert checkpoint.architecture == "mamba"


@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_1"])
def test_rows(path: Path, type_name: str) -> None:
    checkpoint = write(path, types={"token_embd": type_name, "blk.0.attn_v": type_name})
    kind = gguf.GGMLQuantizationType[type_name]
    for name, ours in (("token_embd", "model.embed_tokens.weight"), ("blk.0.attn_v", V)):
        raw = quantize(matrix(name), kind)
        found = checkpoint.rows(ours, (999, 64))
        assert found.type_name == type_name
        assert found.row_order is None
        assert np.array_equal(found.raw, raw.view(np.uint8).reshape(ROWS[name], -1))
        assert np.array_equal(found.dequantize(), dequantize(raw, kind))


def test_q_and_k_are_deinterleaved(path: Path) -> None:
    checkpoint = write(path)
    for name, ours, heads in (("blk.0.attn_q", Q, 4), ("blk.0.attn_k", K, 2)):
        found = checkpoint.rows(ours, (128, 64))
        pairs = matrix(name).reshape(heads, 8, 2, 64)
        expected = pairs.swapaxes(1, 2).reshape(-1, 64)
        assert np.array_equal(found.dequantize(), expected)
        assert found.row_order is not None
        assert np.array_equal(found.raw.view(np.float32)[found.row_order], expected)


def test_formats(path: Path) -> None:
    types = {"blk.0.attn_q": "Q4_1", "blk.0.attn_k": "Q4_1", "blk.0.attn_v": "Q8_0"}
    checkpoint = write(path, types=types)
    assert checkpoint.format_of((Q, K)) is Format.Q4M
    assert checkpoint.format_of((V,)) is Format.Q8
    assert checkpoint.format_of(("model.embed_tokens.weight",)) is Format.F32
    assert not checkpoint.notes
    assert checkpoint.format_of((Q, K, V)) is Format.Q8  # holds both
    assert checkpoint.notes == [
        "tiny.gguf: tensors held in a format near their own, rounded to nearest: 2 of Q4_1 as q8"
    ]
    assert checkpoint.format_of((Q, "model.embed_tokens.weight")) is Format.F32


@pytest.mark.parametrize(
    ("type_name", "format_", "rounded"),
    [
        ("F16", Format.F16, False),
        ("BF16", Format.BF16, False),
        ("Q4_0", Format.Q4, False),
        ("Q5_0", Format.Q8, False),
        ("Q5_1", Format.Q8, True),
        ("MXFP4", Format.Q8, False),
    ],
)
def test_other_types_take_the_format_nearest(
    path: Path, type_name: str, format_: Format, rounded: bool
) -> None:
    checkpoint = write(path, types={"blk.0.attn_v": type_name})
    assert checkpoint.format_of((V,)) is format_
    note = f"tiny.gguf: tensors held in a format near their own, rounded to nearest: 1 of {type_name} as q8"
    assert checkpoint.notes == ([note] if rounded else [])


def test_types_that_are_no_weights_are_refused_by_name(path: Path) -> None:
    checkpoint = write(path, extra={"output.weight": np.ones((50, 64), np.int8)})  # type: ignore[dict-item]
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: tensor 'output\.weight' is I8, which no"):
        checkpoint.format_of(("lm_head.weight",))


def test_missing_tensors_are_named_as_the_file_would(path: Path) -> None:
    checkpoint = write(path, without=("blk.0.attn_v",))
    for ask in (
        lambda: checkpoint.rows(V, (32, 64)),
        lambda: checkpoint.format_of((K, V)),
        lambda: checkpoint.shape(V),
    ):
        with pytest.raises(CheckpointError, match=r"tiny\.gguf: tensor 'blk\.0\.attn_v\.weight' is missing"):
            ask()
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd\.weight' is missing"):
        _ = write(path, without=("token_embd",)).config


def test_rows_of_another_width_are_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_v\.weight' has shape \(32, 64\).*\[\*, 128\]"):
        write(path).rows(V, (32, 128))


def test_q_and_k_have_the_rows_of_their_heads(path: Path) -> None:
    """Whatever the rows of q, k and v add up to."""
    checkpoint = write(path, metadata={"attention.head_count": 2, "attention.key_length": 16})
    with pytest.raises(CheckpointError, match=r"'blk\.0\.attn_q\.weight' has 64 rows, .* make it 32"):
        checkpoint.rows(Q, (128, 64))


def test_tensors_that_nobody_uses_are_refused_by_name(path: Path) -> None:
    """A bias lies beside its weight."""
    names = ["model.embed_tokens.weight", Q, K, V]
    write(path).check_all_used(names)
    extra = {"blk.0.ffn_up.bias": np.ones(8, np.float32), "blk.0.attn_q.bias": np.ones(64, np.float32)}
    checkpoint = write(path, extra=extra)
    with pytest.raises(
        UnsupportedModelError,
        match=r"not served with: blk\.0\.attn_q\.bias, blk\.0\.ffn_up\.bias",
    ):
        checkpoint.check_all_used(names)
    with pytest.raises(UnsupportedModelError, match=r"served with: t0, t1, .*, t7 and 2 more$"):
        write(path, extra={f"t{i}": np.ones(1, np.float32) for i in range(10)}).check_all_used(names)


def test_experts_are_the_matrices_of_a_stack(path: Path) -> None:
    stack = np.arange(4 * 8 * 64, dtype=np.float32).reshape(4, 8, 64)
    metadata = {"expert_count": 4, "expert_used_count": 2}
    checkpoint = write(path, metadata=metadata, extra={"blk.0.ffn_gate_exps.weight": stack})
    names = [f"{LAYER}.block_sparse_moe.experts.{e}.w1.weight" for e in range(5)]
    for name, matrix in zip(names, stack, strict=False):
        assert checkpoint.shape(name) == (8, 64)
        assert np.array_equal(checkpoint.rows(name, (64, 64)).raw.view(np.float32), matrix)
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_gate_exps\.weight\[4\]' is missing"):
        checkpoint.shape(names[4])
    used = ["model.embed_tokens.weight", Q, K, V, *names[:3]]
    with pytest.raises(UnsupportedModelError, match=r"not served with: blk\.0\.ffn_gate_exps\.weight\[3\]$"):
        checkpoint.check_all_used(used)


def test_a_stack_of_another_shape_is_damage(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight' of shape \[64\] is no stack"):
        write(path, extra={"blk.0.ffn_up_exps.weight": np.ones(64, np.float32)})
    checkpoint = write(path, extra={"blk.0.ffn_up_exps.weight": np.ones((8, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight\[0\]' has shape \(64,\), but"):
        checkpoint.rows(f"{LAYER}.mlp.experts.0.up_proj.weight", (8, 64))


def test_nothing_is_read_after_close(path: Path) -> None:
    checkpoint = write(path)
    rows = checkpoint.rows(V, (32, 64))
    checkpoint.close()
    with pytest.raises(ValueError, match="was closed"):
        _ = rows.raw


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["rope_parameters"]["rope_theta"] == 100000.0
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.config["vocab_size"] == 49152
    assert checkpoint.config["max_position_embeddings"] == 8192
