"""The runner: predict() and its errors, steps that follow a plan, and memory equal to its bill."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.backends.native import library
from octavo.backends.torch.backend import TorchBackend
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.errors import (
    CheckpointError,
    ConfigError,
    InsufficientMemoryError,
    InvalidRequestError,
    UnsupportedModelError,
)
from octavo.kv_cache.sizing import GIB, RESERVE_NBYTES, MemoryBill, make_bill
from octavo.messages import NewRow, RowStep, SchedulerOutput
from octavo.program.ir import DType
from octavo.runner.cpu_model_runner import CPUModelRunner
from octavo.runner.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams
from tiny_models import NUM_TOKENS, TinyModel, make_llama_directory, make_llama_gguf

CONTEXT = 200


def config(**settings: Any) -> EngineConfig:
    defaults = {"max_model_len": CONTEXT, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return resolve({"backend": "torch", "threads": 1} | defaults | settings).config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny Llama in F32."""
    return make_llama_gguf(tmp_path_factory.mktemp("runner"))


@pytest.fixture(scope="module")
def runner(tiny: TinyModel) -> ModelRunner:
    """A runner that only predict() is called on."""
    return ModelRunner(tiny.path, config())


def random_ids(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, NUM_TOKENS, length).tolist()
    return ids


# -- predict --------------------------------------------------------------------------------------


def test_model_runner_makes_the_runner_of_the_device(runner: ModelRunner) -> None:
    assert type(runner) is CPUModelRunner
    assert runner.backend.name == "torch"
    assert runner.max_model_len == CONTEXT


def test_predict_takes_a_batch(runner: ModelRunner) -> None:
    batch = [random_ids(20, 1), random_ids(20, 2)]
    logits = runner.predict(batch)
    assert (logits.shape, logits.dtype) == ((2, 20, NUM_TOKENS), np.float32)
    for ids, row in zip(batch, logits, strict=True):
        assert np.array_equal(runner.predict([ids])[0], row), "alone as in a batch"
    assert np.array_equal(runner.predict(np.array(batch)), logits), "an array will do"


def test_predict_does_not_see_the_future(runner: ModelRunner) -> None:
    ids = random_ids(50)
    whole = runner.predict([ids])[0]
    assert np.array_equal(runner.predict([ids[:23]])[0], whole[:23])


def test_memory_that_the_process_cannot_get(tiny: TinyModel) -> None:
    """An EiB: more than addresses reach."""
    runner = CPUModelRunner(tiny.path, config())
    with pytest.raises(
        InsufficientMemoryError, match=r"this process could not get it: .*lower --kv-cache-gib"
    ):
        runner.load((1 << 60) // runner.program.block_nbytes)
    runner.close()


def test_predict_up_to_the_whole_context(runner: ModelRunner) -> None:
    assert runner.predict([random_ids(CONTEXT)]).shape == (1, CONTEXT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 2], [3]], r"batch of equally long rows; these have \[1, 2\] tokens"),
        ([], r"these have no tokens"),
        ([[]], r"takes 1\.\.200 tokens a row, got 0"),
        ([[], []], r"takes 1\.\.200 tokens a row, got 0"),
        ([[0] * 201], r"takes 1\.\.200 tokens a row, got 201"),
        ([[1, NUM_TOKENS]], rf"token {NUM_TOKENS} is outside the vocabulary, 0\.\.{NUM_TOKENS - 1}"),
        ([[-1]], r"token -1 is outside the vocabulary"),
        ([[2**40]], r"token 1099511627776 is outside the vocabulary"),
        ([1, 2, 3], r"a batch of rows of token ids, such as \[\[1, 2, 3\]\]"),
        (np.array([1, 2, 3]), r"a batch of rows of token ids"),
        ([[1.5, 2.0]], r"token 1\.5 is a float; ids are integers"),
        ([["a"]], r"token 'a' is a str; ids are integers"),
    ],
    ids=str,
)
def test_predict_refuses(runner: ModelRunner, ids: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        runner.predict(ids)


# -- what is refused before memory is allocated ---------------------------------------------------


def test_devices(tiny: TinyModel) -> None:
    for cls in (ModelRunner, CPUModelRunner):
        with pytest.raises(ConfigError, match=r"device is 'cuda'; .* write auto or cpu"):
            cls(tiny.path, config(), device="cuda")


def test_a_context_longer_than_the_model(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 513 is more than the 512 positions that tiny"):
        ModelRunner(tiny.path, config(max_model_len=513))
    assert ModelRunner(tiny.path, config(max_model_len=0)).max_model_len == 512


def test_the_kv_dtype(tiny: TinyModel) -> None:
    kinds = {"auto": DType.F32, "f16": DType.F16, "bf16": DType.BF16, "f32": DType.F32}
    for asked, expected in kinds.items():
        program = ModelRunner(tiny.path, config(kv_dtype=asked)).program
        assert {kv.dtype for kv in program.kv_layers} == {expected}


def with_metadata(tiny: TinyModel, path: Path, key: str, old: int, new: int) -> Path:
    """A copy of the file that says something else about its tensors."""
    before, after = (f"llama.{key}".encode() + struct.pack("<II", 4, value) for value in (old, new))
    data = tiny.path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    return path


@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        ("feed_forward_length", 128, 96, r"mlp\.gate_proj\.weight, .*up_proj\.weight are 256 in all, .* 192"),
        ("attention.head_count", 4, 8, r"q_proj\.weight, .* are 128 in all, but .* make it 192"),
        ("embedding_length", 64, 32, r"'token_embd\.weight' has shape \(262, 64\), .* make it \[\*, 32\]"),
        ("block_count", 2, 3, r"tensor 'blk\.2\.attn_norm\.weight' is missing"),
    ],
)
def test_rows_that_do_not_fit(
    tiny: TinyModel, tmp_path: Path, key: str, old: int, new: int, message: str
) -> None:
    path = with_metadata(tiny, tmp_path / "odd.gguf", key, old, new)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(path, config())


def test_layers_that_would_be_left_out(tiny: TinyModel, tmp_path: Path) -> None:
    path = with_metadata(tiny, tmp_path / "odd.gguf", "block_count", 2, 1)
    with pytest.raises(UnsupportedModelError, match=r"not served with: blk\.1\.attn_k\.weight, .*and 1 more"):
        ModelRunner(path, config())


def test_biases_are_refused_not_left_out(tmp_path: Path) -> None:
    biased = make_llama_gguf(tmp_path, mlp_bias=True)
    with pytest.raises(UnsupportedModelError, match=r"not served with: blk\.0\.ffn_down\.bias, "):
        ModelRunner(biased.path, config())


def test_an_architecture_is_refused_by_its_name(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    value = struct.pack("<Q", 5)
    data = tiny.path.read_bytes()
    assert data.count(value + b"llama") == 1
    path.write_bytes(data.replace(value + b"llama", value + b"mamba"))
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba' is not served"):
        ModelRunner(path, config())


# -- memory: acceptance line 7 --------------------------------------------------------------------


def bill_of(runner: ModelRunner, *, gib: float = 0.0, available: int = 8 * GIB) -> MemoryBill:
    return make_bill(
        runner.sealed,
        step_inputs=runner.inputs.nbytes,
        request_states=runner.states.nbytes,
        kv_cache_gib=gib,
        available=available,
    )


@pytest.mark.parametrize("quantization", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("quantized_arithmetic", [False, True])
def test_memory_is_the_bill_to_the_byte(
    tmp_path: Path, quantization: str, quantized_arithmetic: bool
) -> None:
    tiny = make_llama_gguf(tmp_path, quantization=quantization)
    backend = TorchBackend(quantized=quantized_arithmetic)
    runner = ModelRunner(tiny.path, config(kv_dtype="f16"), backend=backend)
    bill = bill_of(runner, gib=0.001)
    runner.load(bill.num_blocks)
    memory = runner.memory
    assert memory.weights.nbytes == bill.weights
    assert memory.arena.nbytes == bill.arena
    assert memory.kv.nbytes == bill.kv
    assert runner.inputs.nbytes == bill.step_inputs
    assert runner.states.nbytes == bill.request_states
    held = (memory.weights, memory.arena, memory.kv, runner.inputs, runner.states)
    assert sum(part.nbytes for part in held) == bill.total - RESERVE_NBYTES
    # two layers of K and V, two heads of 16, blocks of 16 tokens, two bytes each
    assert bill.num_blocks == int(0.001 * GIB) // (2 * 2 * 2 * 16 * 16 * 2)


def test_the_default_kv_cache_is_a_share_of_what_is_free(runner: ModelRunner) -> None:
    one = -(-CONTEXT // 16)
    assert bill_of(runner).num_blocks == 4 * one, "never more than all rows can fill"
    fixed = bill_of(runner, gib=0.001).total - bill_of(runner, gib=0.001).kv
    block = runner.program.block_nbytes
    tight = bill_of(runner, available=fixed + 4 * 20 * block)
    assert tight.num_blocks == 20
    just = bill_of(runner, available=fixed + one * block)
    assert just.num_blocks == one


def test_a_cache_too_small_for_one_sequence(runner: ModelRunner) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        bill_of(runner, gib=0.00004)
    message = str(caught.value)
    assert "4e-05 GiB of KV cache hold 5 blocks, but one sequence of 200 tokens needs 13" in message
    assert "--kv-cache-gib" in message
    assert "--max-model-len" in message


@pytest.mark.parametrize(("gib", "available"), [(0.0, 100 << 20), (4.0, GIB), (0.0, 0)])
def test_a_bill_that_does_not_fit_is_itemised(runner: ModelRunner, gib: float, available: int) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        bill_of(runner, gib=gib, available=available)
    message = str(caught.value)
    assert f"but {available / GIB:.2f} GiB are free" in message
    for item in (
        "weights",
        "activation arena",
        "step inputs",
        "request rows",
        "KV cache",
        "reserve 256.0 MiB",
    ):
        assert item in message
    for flag in ("--kv-cache-gib", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"):
        assert flag in message


# -- steps ----------------------------------------------------------------------------------------


class Driver:
    """Plays the scheduler: each request has blocks of its own, taken from the pool's end."""

    def __init__(self, tiny: TinyModel, **settings: Any) -> None:
        self.runner = ModelRunner(tiny.path, config(**settings))
        self.runner.load(60)
        self.free = list(range(60))
        self.steps = 0

    def plan(
        self, rows: list[tuple[str, int, int, bool]], new: list[NewRow] | None = None, **fields: Any
    ) -> SchedulerOutput:
        """rows: (request, start, number of tokens, samples)."""
        self.steps += 1
        writes = {row.request_id: [self.free.pop() for _ in range(13)] for row in new or []}
        return SchedulerOutput(
            step=self.steps,
            reset=fields.get("reset", False),
            dropped=fields.get("dropped", []),
            new_rows=new or [],
            rows=[
                RowStep(
                    request_id=request_id,
                    start=start,
                    num_tokens=count,
                    block_writes=[(0, writes.get(request_id, []))],
                    samples=samples,
                )
                for request_id, start, count, samples in rows
            ],
            num_tokens=sum(count for _, _, count, _ in rows),
        )

    def run(self, plan: SchedulerOutput) -> dict[str, int]:
        self.runner.execute(plan)
        output = self.runner.sample()
        assert output.step == plan.step
        assert all(token.error is None for token in output.sampled)
        return {token.request_id: token.token_id for token in output.sampled}


def new_row(request_id: str, prompt: list[int], output: list[int] | None = None, **params: Any) -> NewRow:
    return NewRow(
        request_id=request_id,
        prompt_ids=prompt,
        output_ids=output or [],
        params=SamplingParams(**({"temperature": 0} | params)),
    )


def greedy(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(runner.predict([ids])[0, -1].argmax()))
    return ids[len(prompt) :]


def test_steps_compute_what_predict_does(tiny: TinyModel, runner: ModelRunner) -> None:
    """Two requests, one prefilled in chunks while the other decodes; their tokens are read from the rows."""
    driver = Driver(tiny)
    a, b = random_ids(30, 1), random_ids(50, 2)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    plans = [
        ([("a", 0, 30, True)], [new_row("a", a)]),
        ([("a", 30, 1, True), ("b", 0, 20, False)], [new_row("b", b)]),
        ([("b", 20, 30, True), ("a", 31, 1, True)], []),
        ([("a", 32, 1, True), ("b", 50, 1, True)], []),
    ]
    for rows, new in plans:
        for request_id, token in driver.run(driver.plan(rows, new)).items():
            tokens[request_id].append(token)
    assert tokens == {"a": greedy(runner, a, 4), "b": greedy(runner, b, 2)}


def logits_of(driver: Driver, plan: SchedulerOutput) -> npt.NDArray[np.float32]:
    driver.runner.execute(plan)
    assert driver.runner._pending is not None
    return driver.runner._pending[1].numpy().copy()


def test_a_step_twice_is_a_step_once(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    rows = [("a", 0, 30, True), ("b", 0, 20, True)]
    plan = driver.plan(rows, [new_row("a", random_ids(30, 1)), new_row("b", random_ids(20, 2))])
    first = logits_of(driver, plan)
    assert np.array_equal(logits_of(driver, plan), first)
    first_tokens = driver.runner.sample()
    logits_of(driver, plan)
    assert driver.runner.sample() == first_tokens


def test_a_resumed_request_goes_on_as_it_would_have(tiny: TinyModel) -> None:
    """After a reset its row comes back with the output so far; seed and penalties do the rest."""
    prompt, params = random_ids(20, 3), {"temperature": 1.0, "seed": 9, "presence_penalty": 1.0}
    driver = Driver(tiny)
    plans = [driver.plan([("a", 0, 20, True)], [new_row("a", prompt, **params)])]
    plans += [driver.plan([("a", position, 1, True)]) for position in range(20, 26)]
    output = [driver.run(plan)["a"] for plan in plans]
    again = new_row("a", prompt, output[:3], **params)
    plan = driver.plan([("a", 0, 23, True)], [again], reset=True)
    assert driver.run(plan)["a"] == output[3]
    assert driver.run(driver.plan([("a", 23, 1, True)]))["a"] == output[4]


def test_a_dropped_row_makes_room(tiny: TinyModel) -> None:
    driver = Driver(tiny, max_num_seqs=1)
    driver.run(driver.plan([("a", 0, 10, True)], [new_row("a", random_ids(10))]))
    alone = driver.run(driver.plan([("b", 0, 10, True)], [new_row("b", random_ids(10))], dropped=["a"]))
    assert alone.keys() == {"b"}


def test_steps_that_sample_nothing(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    assert driver.run(driver.plan([("a", 0, 10, False)], [new_row("a", random_ids(20))])) == {}


def test_sampling_needs_a_step(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    with pytest.raises(AssertionError, match=r"execute\(\) comes first"):
        driver.runner.sample()


@pytest.mark.parametrize("dtype", ["auto", "f32", "bf16", "f16"])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_plain_weights_are_held_as_asked(
    tmp_path: Path, backend: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    if backend == "native" and not library.available():
        pytest.skip("the native library is not built")
    tiny = make_llama_directory(tmp_path, dtype="bfloat16")
    settings = {"backend": backend, "dtype": dtype, "kv_dtype": "f32", "threads": 1, "max_model_len": 64}
    with caplog.at_level("INFO"):
        runner = ModelRunner(tmp_path, resolve(settings).config)
    assert runner.weight_formats == ["bf16" if dtype == "auto" else dtype]
    rounded = [record.getMessage() for record in caplog.records if "BF16 as" in record.getMessage()]
    assert bool(rounded) == (dtype == "f16")
    ids = [list(range(1, 40))]
    expected = tiny.logits(ids)
    assert np.abs(runner.predict(ids) - expected).max() < 1e-5 * np.abs(expected).max()
    runner.close()
