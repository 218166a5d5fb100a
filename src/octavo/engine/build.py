"""Puts an engine together: open, count memory, load, wire.

Rule: the order is the point. Nothing is allocated before the bill is known to fit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from octavo.config.schema import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.fingerprint import fingerprint
from octavo.errors import CheckpointError, ConfigError
from octavo.executor.uniproc import UniprocExecutor
from octavo.input.chat_template import ChatTemplate
from octavo.input.input_processor import InputProcessor
from octavo.input.tokenizer import Tokenizer
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.sizing import MemoryBill, make_bill
from octavo.output.output_processor import OutputProcessor
from octavo.platforms import cpu
from octavo.runner.cpu_model_runner import CPUModelRunner
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.policy import Policy
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits
from octavo.weights.checkpoint import Checkpoint, naming


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served, for people and /v1/models. isa: of the native kernels; empty on other backends.
    fingerprint: OpenAI's system_fingerprint."""

    name: str
    backend: str
    isa: str
    fingerprint: str
    weight_formats: str
    kv_dtype: str
    policy: Policy
    max_model_len: int
    vocab_size: int
    bill: MemoryBill
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's parts: the core, and what turns text into requests and outputs into text."""

    core: EngineCore
    inputs: InputProcessor
    outputs: OutputProcessor
    info: ModelInfo


def build_engine(config: EngineConfig) -> Engine:
    """An engine for a config, loaded and ready to step."""
    started = time.perf_counter()
    runner = CPUModelRunner(config.model, config)
    try:
        return _build(config, runner, started)
    except BaseException:
        runner.close()
        raise


def _build(config: EngineConfig, runner: ModelRunner, started: float) -> Engine:
    inputs = input_processor(config, runner)  # first: a tokenizer not served should not cost a load
    bill = bill_for(config, runner)
    runner.load(bill.num_blocks)
    kv = KVCacheManager(
        bill.num_blocks,
        runner.program.kv_groups,
        prefix_caching=config.prefix_caching,
        step_tokens=config.max_num_batched_tokens,
    )
    limits = SchedulerLimits(config.max_num_batched_tokens, config.max_num_seqs)
    boundary = runner.program.rope_boundary
    scheduler = Scheduler(limits, kv, policy=Policy(config.policy), rope_boundary=boundary)
    info = ModelInfo(
        name=Path(config.model).stem if config.model.endswith(".gguf") else config.model,
        backend=runner.backend.name,
        isa=getattr(runner.backend, "isa", ""),
        fingerprint=_fingerprint(config, runner),
        weight_formats=" and ".join(runner.weight_formats),
        kv_dtype=runner.program.kv_layers[0].dtype,
        policy=Policy(config.policy),
        max_model_len=runner.max_model_len,
        vocab_size=runner.program.vocab_size,
        bill=bill,
        load_seconds=time.perf_counter() - started,
    )
    core = EngineCore(scheduler, UniprocExecutor(runner))
    return Engine(core, inputs, OutputProcessor(inputs.tokenizer), info)


def _fingerprint(config: EngineConfig, runner: ModelRunner) -> str:
    return fingerprint(
        runner.checkpoint.path,
        backend=runner.backend.name,
        weight_formats=tuple(runner.weight_formats),
        kv_dtype=str(runner.program.kv_layers[0].dtype),
        activation_bits=config.activation_bits,
        deterministic=True,  # as all backends of the CPU are
    )


def bill_for(config: EngineConfig, runner: ModelRunner) -> MemoryBill:
    """What the engine will hold. InsufficientMemoryError where that is more than there is."""
    return make_bill(
        runner.sealed,
        step_inputs=runner.inputs.nbytes,
        request_states=runner.states.nbytes,
        kv_cache_gib=config.kv_cache_gib,
        available=cpu.available_memory(),
    )


def input_processor(config: EngineConfig, runner: ModelRunner) -> InputProcessor:
    """What turns text into requests for the runner's model."""
    path = runner.checkpoint.path
    with naming(path):
        tokenizer = _tokenizer(config, runner.checkpoint)
        template = _chat_template(tokenizer)
    if tokenizer.vocab_size > runner.program.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has embeddings for "
            f"{runner.program.vocab_size}; convert the model again"
        )
    return InputProcessor(
        tokenizer, template, max_model_len=runner.max_model_len, vocab_size=runner.program.vocab_size
    )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """Of the files beside a directory's weights, or of what a GGUF file says of itself."""
    if not checkpoint.path.is_dir():
        return Tokenizer.from_gguf(checkpoint.metadata, pre_tokenizer=config.pre_tokenizer or None)
    if config.pre_tokenizer:
        raise ConfigError(
            f"--pre-tokenizer is {config.pre_tokenizer!r}, but {checkpoint.path} is a directory, whose own "
            "tokenizer files say how text is cut; leave it out"
        )
    return Tokenizer.from_directory(checkpoint.path)


def _chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if not tokenizer.chat_templates:
        return None
    bos = "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
    return ChatTemplate(tokenizer.chat_templates, bos_token=bos, eos_token=eos)
