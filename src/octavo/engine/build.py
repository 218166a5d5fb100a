"""Puts an engine together: open, count memory, load, wire.

Rule: the order is the point. Nothing is allocated before the bill is known to fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.schema import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.core_client import Client, Deliver, OnDeath, ThreadClient
from octavo.engine.fingerprint import fingerprint
from octavo.engine.model_info import ModelInfo
from octavo.executor.uniproc import UniprocExecutor
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.sizing import MemoryBill, make_bill
from octavo.platforms import cpu
from octavo.runner.cpu_model_runner import CPUModelRunner
from octavo.runner.model_runner import ModelRunner
from octavo.scheduler.policy import Policy
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

if TYPE_CHECKING:
    from octavo.input.input_processor import InputProcessor
    from octavo.output.output_processor import OutputProcessor


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's parts, in this process: the core, and what turns text into requests and outputs into
    text."""

    core: EngineCore
    inputs: InputProcessor
    outputs: OutputProcessor
    info: ModelInfo

    def connect(self, deliver: Deliver, on_death: OnDeath) -> Client:
        """Run the core in a thread of its own. Whoever has the client owns the core."""
        return ThreadClient(self.core, deliver, on_death)


def build_engine(config: EngineConfig) -> Engine:
    """An engine for a config, loaded and ready to step."""
    from octavo.output.output_processor import OutputProcessor

    made: list[InputProcessor] = []
    # First: a tokenizer that can't be served should not cost a load.
    core, info = build_core(
        config, before_loading=lambda runner: made.append(input_processor(config, runner))
    )
    (inputs,) = made
    return Engine(core, inputs, OutputProcessor(inputs.tokenizer), info)


def build_core(
    config: EngineConfig, *, before_loading: Callable[[ModelRunner], None] = lambda _: None
) -> tuple[EngineCore, ModelInfo]:
    """The core alone, which knows no text. before_loading: called when the model is known and nothing is
    allocated yet."""
    started = time.perf_counter()
    runner = CPUModelRunner(config.model, config)
    try:
        before_loading(runner)
        bill = bill_for(config, runner)
        runner.load(bill.num_blocks)
    except BaseException:
        runner.close()
        raise
    return _wire(config, runner, bill), _info(config, runner, bill, time.perf_counter() - started)


def _wire(config: EngineConfig, runner: ModelRunner, bill: MemoryBill) -> EngineCore:
    kv = KVCacheManager(
        bill.num_blocks,
        runner.program.kv_groups,
        prefix_caching=config.prefix_caching,
        step_tokens=config.max_num_batched_tokens,
    )
    limits = SchedulerLimits(config.max_num_batched_tokens, config.max_num_seqs)
    boundary = runner.program.rope_boundary
    scheduler = Scheduler(limits, kv, policy=Policy(config.policy), rope_boundary=boundary)
    return EngineCore(scheduler, UniprocExecutor(runner))


def _info(config: EngineConfig, runner: ModelRunner, bill: MemoryBill, seconds: float) -> ModelInfo:
    return ModelInfo(
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
        load_seconds=seconds,
    )


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
    from octavo.engine.text import Text  # a process for the core alone has no use for it

    return Text.of(config, runner.checkpoint).inputs(
        max_model_len=runner.max_model_len, vocab_size=runner.program.vocab_size
    )
