"""500 damaged models: each loads and computes something, or is refused by an error that names the file.

Never another exception, never a crash, never more than seconds or much memory. A case that fails is run alone
with pytest -k.
"""

from __future__ import annotations

import json
import math
import random
import re
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import mutate_directory, mutate_gguf
from packers import quantize_directory
from test_quantized import CONFIGS, pack

from families import make_model
from gguf_converter import write_gguf
from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.errors import CheckpointError, InsufficientMemoryError, OctavoError, UnsupportedModelError
from tiny_models import NUM_TOKENS, add_tokenizer, make_llama_directory, make_llama_gguf, write_tokenizer

SECONDS = 5
#: What a load may map beyond what the process has, many times what a sound tiny model takes.
MEMORY_NBYTES = 1 << 30
#: auto: native where it was built and serves the family.
BACKENDS = ("torch", "auto") if library.available() else ("torch",)
SIZES = {"num_hidden_layers": 1, "max_position_embeddings": 64}
#: Families whose builders read what a Llama's does not.
GGUF_FAMILIES = ("llama llama3 rope", "gemma3", "gpt-oss", "mixtral")
DIRECTORY_FAMILIES = (*GGUF_FAMILIES, "qwen3 moe", "phi3 longrope", "granite", "smollm3")


@pytest.fixture(scope="module")
def gguf_seeds(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    directory = tmp_path_factory.mktemp("seeds")
    sizes = dict.fromkeys(("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"), SIZES)
    sizes["Q4_K"] = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # blocks of 256
    paths = [make_llama_gguf(directory, quantization=kind, **size).path for kind, size in sizes.items()]
    for family in GGUF_FAMILIES:
        paths.append(directory / f"{family}.gguf")
        model = make_model(family, vocab_size=NUM_TOKENS)
        write_gguf(paths[-1], model, extend=lambda writer: add_tokenizer(writer, NUM_TOKENS))
    return [path.read_bytes() for path in paths]


@pytest.fixture(scope="module")
def directory_seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    seeds = {}
    for dtype, shard in (("float32", "60KB"), ("bfloat16", "1GB")):
        seeds[dtype] = tmp_path_factory.mktemp(dtype)
        make_llama_directory(seeds[dtype], dtype=dtype, max_shard_size=shard, **SIZES)
    for family in DIRECTORY_FAMILIES:
        seeds[family] = tmp_path_factory.mktemp("family")
        make_model(family, vocab_size=NUM_TOKENS).save_pretrained(seeds[family])
    for method, config in CONFIGS.items():
        seeds[method] = tmp_path_factory.mktemp(method)
        quantize_directory(seeds[method], config, pack(method), **SIZES)
    for directory in seeds.values():
        write_tokenizer(directory)
    return seeds


DELETED: Any = object()
NO_SENSE: list[Any] = [
    DELETED, None, True, 0, -1, 1.5, 2**31 - 1, 2**31, 2**60, 10**400, math.nan, math.inf, "x", [], {}, [1],
]  # fmt: skip
#: Keys of a Llama's config, and which of the values they may have.
KEYS: dict[str, list[Any]] = {
    "hidden_size": [], "intermediate_size": [], "num_hidden_layers": [], "num_attention_heads": [],
    "max_position_embeddings": [2**31 - 1], "vocab_size": [], "rms_norm_eps": [1.5, 2**31 - 1, 2**31, 2**60],
    "num_key_value_heads": [], "head_dim": [DELETED, None], "model_type": [],
    "tie_word_embeddings": [DELETED, None, True],  # if it is set, the head is a copy that nobody needs
    "rope_parameters": [DELETED, None, {}], "hidden_act": [DELETED, None], "attention_bias": [DELETED, None],
    "mlp_bias": [DELETED, None],
}  # fmt: skip


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let allocations fail that take the process beyond MEMORY_NBYTES more."""
    status = Path("/proc/self/status").read_text()
    mapped = int(status.split("VmSize:")[1].split()[0]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_NBYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def load_and_predict(path: Path, backend: str) -> None:
    settings = {"backend": backend, "threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    engine = build_engine(resolve({"model": str(path), **settings}, {}).config)
    try:
        runner = engine.core._executor._runner
        ids = [1, 2, 3][: engine.info.max_model_len]
        logits = runner.predict([ids])
        assert logits.shape == (1, len(ids), engine.info.vocab_size)
        assert logits.dtype == np.float32
        engine.inputs.tokenizer.decode(engine.inputs.tokenizer.encode("the 1234's\n"))
    finally:
        engine.core.close()


def outcome(path: Path, backend: str) -> OctavoError | None:
    """The error that refuses a model, or None for one that computes something."""
    try:
        with limited_memory():
            load_and_predict(path, backend)
    except OctavoError as error:
        return error
    return None


def assert_loads_or_is_refused(path: Path, what: str) -> None:
    """The model at `path`, which `what` was done to, loads or is refused as it should be."""
    for backend in BACKENDS:
        started = time.monotonic()
        try:
            error = outcome(path, backend)
        except BaseException as error:
            pytest.fail(f"{what}\n{backend}: {type(error).__name__}: {error}")
        assert time.monotonic() - started < SECONDS, what
        if error is not None and not isinstance(error, InsufficientMemoryError):
            assert path.name in str(error), f"{what}\n{type(error).__name__} names no file: {error}"
            assert len(str(error)) < 2000, f"{what}\n{type(error).__name__} is too long: {error}"


@pytest.mark.parametrize("seed", range(250))
def test_a_damaged_gguf_file(seed: int, gguf_seeds: list[bytes], tmp_path: Path) -> None:
    rng = random.Random(f"gguf {seed}")
    data, what = mutate_gguf(rng.choice(gguf_seeds), rng)
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(data)
    assert_loads_or_is_refused(path, what)


@pytest.mark.parametrize("seed", range(250))
def test_a_damaged_directory(seed: int, directory_seeds: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(f"directory {seed}")
    path = tmp_path / "fuzzed-model"
    shutil.copytree(rng.choice(list(directory_seeds.values())), path)
    assert_loads_or_is_refused(path, mutate_directory(path, rng))


@pytest.mark.parametrize(
    "value", NO_SENSE, ids=lambda value: "deleted" if value is DELETED else repr(value)[:12]
)
@pytest.mark.parametrize("key", KEYS)
def test_a_hyperparameter_that_makes_no_sense(
    key: str, value: Any, directory_seeds: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "fuzzed-model"
    shutil.copytree(directory_seeds["bfloat16"], path)
    config = json.loads((path / "config.json").read_text())
    config[key] = value
    if value is DELETED:
        del config[key]
    (path / "config.json").write_text(json.dumps(config))
    error = outcome(path, "torch")
    if error is None:
        assert any(value is fine or value == fine for fine in KEYS[key])
    elif not isinstance(error, InsufficientMemoryError):  # which quotes the memory bill
        assert str(tmp_path) in str(error) or path.name in str(error)
        names = (key, {"model_type": "architecture", "hidden_act": "activation"}.get(key, key))
        assert any(name in str(error) for name in names) or re.search(r"model\.\w+", str(error)), error


#: Keys that other families' builders read, checked for all.
OPTIONAL_KEYS = [
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "sliding_window", "layer_types",
    "sliding_window_pattern", "decoder_sparse_step", "max_window_layers", "mlp_only_layers",
    "residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling",
    "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "norm_topk_prob",
    "use_sliding_window", "hidden_activation",
]  # fmt: skip


@pytest.mark.parametrize("value", [{"a": 1}, [None], -1, 10**400, math.nan], ids=repr)
@pytest.mark.parametrize("key", OPTIONAL_KEYS)
def test_a_key_of_another_kind_is_refused_by_name(
    key: str, value: Any, directory_seeds: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "fuzzed-model"
    shutil.copytree(directory_seeds["bfloat16"], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is "):
        load_and_predict(path, "torch")


def test_bug_S5_pickles_are_refused_with_a_way_out(directory_seeds: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "pickled"
    shutil.copytree(directory_seeds["bfloat16"], path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    error = outcome(path, "torch")
    assert isinstance(error, UnsupportedModelError)
    assert "pytorch_model.bin" in str(error)
    assert f"octavo convert {path} OUT" in str(error)
