"""Examines a model without loading it: what it is, what would serve it, and what that takes.

Rule: the answers come from the parts that serve: the same checkpoint, program, planner and bill. Nothing
is computed twice in another way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from octavo.config.schema import EngineConfig
from octavo.engine.build import bill_for, input_processor
from octavo.errors import InsufficientMemoryError
from octavo.kv_cache.sizing import MemoryBill, blocks_of_sequence, longest_sequence
from octavo.platforms import cpu
from octavo.runner.cpu_model_runner import CPUModelRunner
from octavo.runner.model_runner import ModelRunner

_FIRST_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class ContextRow:
    """What sequences of one length cost. kv_nbytes: of one; at_once: how many the bill's KV cache holds."""

    length: int
    kv_nbytes: int
    at_once: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What there is to know of a model before it is loaded.

    model, serving: names and values to show. declined: backends passed over, with every reason. notes: what
    loading changes. bill: None, and a reason in memory_error, where it does not fit. available: bytes free
    now. longest: the longest sequence that free memory holds.
    """

    model: list[tuple[str, str]]
    serving: list[tuple[str, str]]
    declined: dict[str, str]
    notes: list[str]
    bill: MemoryBill | None
    memory_error: str | None
    available: int
    longest: int
    contexts: list[ContextRow]


def examine(config: EngineConfig) -> Diagnosis:
    """Open the config's model and plan to serve it. Raises what `octavo serve` would for a model that can't
    be read or served; too little memory is part of the diagnosis."""
    runner = CPUModelRunner(config.model, config)
    try:
        return _examine(config, runner)
    finally:
        runner.close()


def _examine(config: EngineConfig, runner: ModelRunner) -> Diagnosis:
    available = cpu.available_memory()
    bill, memory_error = None, None
    try:
        bill = bill_for(config, runner)
    except InsufficientMemoryError as error:
        memory_error = str(error)
    sealed = runner.sealed
    fixed = sealed.weights_nbytes + sealed.arena_nbytes + runner.inputs.nbytes + runner.states.nbytes
    blocks = max(0, available - fixed) // sealed.program.block_nbytes
    return Diagnosis(
        model=_model(config, runner),
        serving=_serving(runner),
        declined=dict(runner.declined),
        notes=runner.checkpoint.notes,
        bill=bill,
        memory_error=memory_error,
        available=available,
        longest=longest_sequence(sealed, blocks),
        contexts=[] if bill is None else _contexts(runner, bill),
    )


def _model(settings: EngineConfig, runner: ModelRunner) -> list[tuple[str, str]]:
    checkpoint, program = runner.checkpoint, runner.program
    config = checkpoint.config
    tokenizer = input_processor(settings, runner).tokenizer
    parameters = sum(math.prod(weight.shape) for weight in program.weights)
    windows = {kv.window for kv in program.kv_layers} - {None}
    layers = f"{config['num_hidden_layers']} layers"
    if windows:
        windowed = sum(kv.window is not None for kv in program.kv_layers)
        layers += f", {windowed} of them with a window of {', '.join(map(str, sorted(windows, key=str)))}"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return [
        ("path", str(checkpoint.path)),
        ("kind", "Hugging Face directory" if checkpoint.path.is_dir() else "GGUF file"),
        ("size", f"{_size(checkpoint.path) / 1e9:.3f} GB"),
        ("architecture", checkpoint.architecture),
        ("parameters", f"{parameters / 1e6:,.1f} M"),
        ("shape", f"{layers}, hidden {config['hidden_size']}, {heads} heads, {kv_heads} of KV"),
        ("vocabulary", f"{program.vocab_size}, {tokenizer.vocab_size} of them with text"),
        ("trained context", f"{config['max_position_embeddings']} tokens"),
        ("rope", ", ".join(sorted(_rope_types(config["rope_parameters"])))),
        ("ends of an answer", ", ".join(tokenizer.token_text(i) for i in tokenizer.eos_ids) or "none"),
        ("chat templates", ", ".join(tokenizer.chat_templates) or "none: completions only"),
    ]


def _rope_types(parameters: dict[str, object]) -> set[str]:
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(kind["rope_type"]) for kind in kinds}


def _serving(runner: ModelRunner) -> list[tuple[str, str]]:
    return [
        ("device", f"CPU: {cpu.name()}, {cpu.num_threads()} threads"),
        ("backend", runner.backend.name),
        ("weights", " and ".join(runner.weight_formats)),
        ("KV cache", str(runner.program.kv_layers[0].dtype)),
    ]


def _contexts(runner: ModelRunner, bill: MemoryBill) -> list[ContextRow]:
    most, lengths = runner.max_model_len, []
    length = min(_FIRST_LENGTH, most)
    while length < most:
        lengths.append(length)
        length *= 4
    rows = []
    for length in [*lengths, most]:
        blocks = blocks_of_sequence(runner.sealed, length)
        nbytes = blocks * runner.program.block_nbytes
        rows.append(ContextRow(length, nbytes, bill.num_blocks // blocks))
    return rows


def _size(path: Path) -> int:
    """Bytes of the weights on disk."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
