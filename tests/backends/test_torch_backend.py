"""The torch backend as a whole: inputs out of range, quantised embeddings, KV as it is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import TORCH_DTYPES

from octavo.backends.base import StepInputs
from octavo.backends.torch.backend import TorchBackend
from octavo.backends.torch.rotary import kv_views, rotary_store_kv, rotate
from octavo.config.resolve import resolve
from octavo.errors import BackendError
from octavo.program.ir import BLOCK_SIZE, KV, DType, RopeTable
from octavo.program.rope import cos_sin, inverse_frequencies
from octavo.runner.model_runner import ModelRunner
from tiny_models import NUM_TOKENS, TinyModel, make_llama_gguf

NUM_BLOCKS = 10


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny Llama of Q8_0 weights."""
    return make_llama_gguf(tmp_path_factory.mktemp("torch"), quantization="Q8_0")


@pytest.fixture(scope="module")
def runner(tiny: TinyModel) -> ModelRunner:
    """A loaded runner with room for 10 blocks."""
    settings = {"max_model_len": 100, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    runner = ModelRunner(tiny.path, resolve({"backend": "torch", "threads": 1} | settings).config)
    runner.load(NUM_BLOCKS)
    runner.memory.kv.zero_()
    return runner


def two_sequences(inputs: StepInputs) -> None:
    """20 new tokens of a sequence of 20, and 3 of one of 40."""
    inputs.token_ids[:23] = np.arange(23)
    inputs.positions[:23] = inputs.rope_rows[:23] = [*range(20), 37, 38, 39]
    inputs.cu_q[:3] = [0, 20, 23]
    inputs.seq_lens[:2] = [20, 40]
    inputs.block_table[0, 0, :2] = [3, 7]
    inputs.block_table[0, 1, :3] = [1, 2, 9]
    inputs.slot_mapping[0, :23] = [*range(48, 64), *range(112, 116), 37, 38, 39]
    inputs.sampled_rows[:2] = [19, 22]


def poke(name: str, index: int | tuple[int, ...], value: int) -> Callable[[StepInputs], None]:
    def act(inputs: StepInputs) -> None:
        getattr(inputs, name)[index] = value

    return act


BAD = {
    "token too large": (poke("token_ids", 4, NUM_TOKENS), r"token_ids must lie in 0\.\.261, found 0\.\.262"),
    "token negative": (poke("token_ids", 4, -1), r"token_ids must lie"),
    "position too large": (poke("positions", 22, 100), r"positions must lie in 0\.\.99"),
    "position negative": (poke("positions", 0, -1), r"positions must lie"),
    "rope row too large": (poke("rope_rows", 22, 100), r"rope_rows must lie in 0\.\.99"),
    "rope row negative": (poke("rope_rows", 0, -1), r"rope_rows must lie"),
    "position off by one": (
        poke("positions", 21, 39),
        r"3 new tokens of sequence 1 must end at its length, 40",
    ),
    "length off by one": (poke("seq_lens", 1, 41), r"3 new tokens of sequence 1 must end at its length, 41"),
    "length beyond the context": (poke("seq_lens", 1, 101), r"seq_lens must lie in 0\.\.100"),
    "slot too large": (poke("slot_mapping", (0, 3), 160), r"slot_mapping must lie in 0\.\.159"),
    "slot negative": (poke("slot_mapping", (0, 3), -1), r"slot_mapping must lie"),
    "block too large": (poke("block_table", (0, 1, 0), 10), r"block_table of sequence 1 must lie in 0\.\.9"),
    "block negative": (poke("block_table", (0, 0, 1), -1), r"block_table of sequence 0 must lie in 0\.\.9"),
    "sampled row too large": (poke("sampled_rows", 1, 23), r"sampled_rows must lie in 0\.\.22"),
    "cu_q from 1": (poke("cu_q", 0, 1), r"cu_q must rise from 0 to 23, found \[1, 20, 23\]"),
    "cu_q to 22": (poke("cu_q", 2, 22), r"cu_q must rise from 0 to 23"),
    "cu_q falling": (poke("cu_q", 1, 30), r"cu_q must rise from 0 to 23, found \[0, 30, 23\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_inputs_out_of_range_are_refused_before_anything_is_written(runner: ModelRunner, name: str) -> None:
    act, message = BAD[name]
    two_sequences(runner.inputs)
    before = runner.memory.kv.clone(), runner.memory.arena.clone()
    act(runner.inputs)
    with pytest.raises(BackendError, match=message):
        runner.backend.run(23, 2, 2)
    assert torch.equal(runner.memory.kv, before[0])
    assert torch.equal(runner.memory.arena, before[1])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((33, 2, 2), r"the step has 33 tokens, but 1 to 32 fit"),
        ((0, 2, 2), r"the step has 0 tokens, but 1 to 32 fit"),
        ((23, 3, 2), r"the step has 3 sequences, but 1 to 2 fit"),
        ((23, 2, 3), r"the step has 3 sampled rows, but 0 to 2 fit"),
    ],
)
def test_steps_beyond_the_limits(runner: ModelRunner, sizes: tuple[int, int, int], message: str) -> None:
    two_sequences(runner.inputs)
    with pytest.raises(BackendError, match=message):
        runner.backend.run(*sizes)


def test_entries_that_a_step_does_not_use_may_be_anything(runner: ModelRunner) -> None:
    two_sequences(runner.inputs)
    expected = runner.backend.run(23, 2, 2).clone()
    for name in runner.inputs.__slots__:
        getattr(runner.inputs, name)[...] = -(2**31)
    two_sequences(runner.inputs)
    assert torch.equal(runner.backend.run(23, 2, 2), expected)


def test_a_step_may_sample_nothing(runner: ModelRunner) -> None:
    two_sequences(runner.inputs)
    assert runner.backend.run(23, 2, 0).shape == (0, NUM_TOKENS)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1"])
def test_quantised_arithmetic_is_near_and_row_invariant(tmp_path: Path, quantization: str) -> None:
    tiny = make_llama_gguf(tmp_path, quantization=quantization)
    ids = [np.random.default_rng(0).integers(0, NUM_TOKENS, 50).tolist()]
    logits = []
    for chunk in (50, 7):
        settings = {"max_num_batched_tokens": chunk, "max_num_seqs": chunk, "activation_bits": "16"}
        runner = ModelRunner(tiny.path, resolve(settings).config, backend=TorchBackend(quantized=True))
        logits.append(runner.predict(ids))
    assert np.array_equal(logits[0], logits[1])
    difference = logits[0] - tiny.logits(ids)
    # int16 activations have 4095 steps to a group's largest with 8-bit weights (measured: 0.0010), and
    # 32767 with 4-bit ones.
    assert difference.std() / logits[0].std() < (0.0005 if quantization == "Q4_1" else 0.002)


# -- rotation and the cache -----------------------------------------------------------------------


def table(positions: int, dim: int = 16) -> torch.Tensor:
    return torch.from_numpy(cos_sin(RopeTable(0, positions, inverse_frequencies(dim, 1e4))))


def test_rotation_is_the_contract() -> None:
    x = torch.randn(5, 3, 24)
    angles = table(5)
    found = rotate(x, angles)
    for t in range(5):
        for i in range(8):
            low, high, cos, sin = x[t, :, i], x[t, :, i + 8], angles[t, i], angles[t, i + 8]
            assert torch.equal(found[t, :, i], low * cos - high * sin)
            assert torch.equal(found[t, :, i + 8], high * cos + low * sin)
    assert torch.equal(found[:, :, 16:], x[:, :, 16:]), "beyond rotary_dim nothing turns"


@pytest.mark.parametrize("dtype", list(DType))
def test_kv_is_stored_where_the_slot_says(dtype: DType) -> None:
    kv = KV(0, 2, 16, dtype)
    pages = torch.zeros(4, kv.page_nbytes, dtype=torch.uint8)
    caches = kv_views(pages, kv)
    qkv = torch.randn(3, (4 + 2 * 2) * 16)
    slots = [2 * BLOCK_SIZE + 5, 15, 3 * BLOCK_SIZE]
    angles = table(10)[[7, 2, 9]]
    q = rotary_store_kv(qkv, angles, torch.tensor(slots), caches, 4)
    heads = qkv.view(3, 8, 16)
    assert torch.equal(q.view(3, 4, 16), rotate(heads[:, :4], angles))
    # A page is K [HK][D][16] and then V [HK][16][D], by bytes.
    width = TORCH_DTYPES[dtype]
    raw = pages.view(width).reshape(4, 2, -1)
    for t, slot in enumerate(slots):
        block, offset = divmod(slot, BLOCK_SIZE)
        k = raw[block, 0].reshape(2, 16, BLOCK_SIZE)[:, :, offset]
        v = raw[block, 1].reshape(2, BLOCK_SIZE, 16)[:, offset, :]
        assert torch.equal(k, rotate(heads[t : t + 1, 4:6], angles[t : t + 1])[0].to(width))
        assert torch.equal(v, heads[t, 6:].to(width))
    assert (raw != 0).sum() == 3 * 2 * 2 * 16, "nothing else was written"
