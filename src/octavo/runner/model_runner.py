"""Owns every tensor: weights, arena, KV pages, the rows of requests.

Two phases a step: `execute` brings the rows up to date and runs the forward; `sample` turns its logits
into tokens. Runners of different devices differ in memory and streams, not in this logic. Rule: state
follows the scheduler's absolute diffs; nothing here decides who runs.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.backends.base import Backend, ChoosesTokens, DeviceMemory, StepInputs, WeightRows
from octavo.config.resolve import resolve
from octavo.config.schema import ACTIVATION_BITS, EngineConfig
from octavo.errors import (
    CheckpointError,
    ConfigError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelLoadError,
    ProgramError,
)
from octavo.messages import ModelRunnerOutput, PromptLogprobs, RowStep, SchedulerOutput
from octavo.models.registry import Build, model_builder
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import BLOCK_SIZE, DType, Weight
from octavo.program.planner import Limits, seal
from octavo.program.rope import cos_sin
from octavo.quantization.formats import Format
from octavo.runner import step_inputs
from octavo.runner.request_states import RequestStates
from octavo.sampling.choice import choose
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import sample
from octavo.weights.checkpoint import Checkpoint, naming, open_checkpoint
from octavo.weights.config_check import checked_config
from octavo.weights.fetching import progress_bar
from octavo.weights.sources import resolve_model

logger = logging.getLogger(__name__)


class ModelRunner(abc.ABC):
    """Runs one model on one device. `ModelRunner(model, device="auto")` makes the device's runner.

    Built in two parts, so that memory can be counted between them: the constructor opens the checkpoint
    and seals the program; `load` allocates and reads the weights. `predict` loads what it needs.
    """

    def __new__(cls, *args: Any, device: str = "auto", **kwargs: Any) -> ModelRunner:
        """An instance of the class that runs on `device`: auto or cpu."""
        if cls is ModelRunner:
            cls = _runner_class(device)
        return super().__new__(cls)

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        device: str = "auto",
        backend: Backend | None = None,
    ) -> None:
        """model: a path or a catalog name. backend overrides the config's choice."""
        config = config or resolve({}).config
        _runner_class(device)  # refuses what isn't served
        path = resolve_model(str(model), config.cache_path, progress=True, offline=config.offline)
        self.checkpoint = open_checkpoint(path)
        with naming(self.checkpoint.path):
            build = model_builder(self.checkpoint.architecture)
        #: Backends that were passed over, each with every reason.
        self.declined: dict[str, str] = {}
        self.max_model_len = _max_model_len(config, self.checkpoint)
        self.backend = backend or self._choose_backend(config)
        try:
            self._plan(build, config)
        except ProgramError as refusal:
            if backend is not None or config.backend != "auto" or self.backend.name == "torch":
                raise
            logger.warning("%s\nThe torch backend serves it, slowly.", refusal)
            self.declined[self.backend.name] = str(refusal)
            self.backend.close()
            self.backend = self._choose_backend(dataclasses.replace(config, backend="torch"))
            self._plan(build, config)
        self._choose = self.backend.choose if isinstance(self.backend, ChoosesTokens) else choose
        limits = self.sealed.limits
        try:
            self.inputs = StepInputs.allocate(limits, len(self.program.kv_groups))
            self.states = RequestStates(limits, len(self.program.kv_groups))
        except MemoryError as error:
            raise InsufficientMemoryError(
                f"{limits.max_seqs} requests of up to {limits.max_model_len} tokens need more memory for "
                "their rows than there is. Lower --max-model-len or --max-num-seqs"
            ) from error
        self._memory: DeviceMemory | None = None
        self._pending: tuple[SchedulerOutput, torch.Tensor] | None = None

    def _plan(self, build: Build, config: EngineConfig) -> None:
        """Build the program and seal it for the backend; ProgramError says what it does not serve."""
        plain = None if config.dtype == "auto" else Format(config.dtype)
        activation_bits, feed_forward_bits = ACTIVATION_BITS[config.activation_bits]
        builder = ProgramBuilder(
            self.checkpoint.architecture,
            format_of=lambda parts: self.checkpoint.format_of(parts, plain, config.quantization),
            kv_dtype=_kv_dtype(config, self.backend),
            activation_bits=activation_bits,
            feed_forward_bits=feed_forward_bits,
        )
        with naming(self.checkpoint.path):
            self.program = build(builder, checked_config(self.checkpoint), self.max_model_len)
        self.checkpoint.check_all_used(part for weight in self.program.weights for part in weight.parts)
        if config.quantization != "none" and not self.checkpoint.quantized_on_load:
            raise ConfigError(
                f"--quantization {config.quantization} is for weights that are stored plain, but those of "
                f"{self.checkpoint.path.name} are {' and '.join(self.weight_formats)} already, or have rows "
                "of no multiple of 32; leave it away"
            )
        self._parts = {weight.id: _parts(self.checkpoint, weight) for weight in self.program.weights}
        for note in self.checkpoint.notes:
            logger.info(note)
        limits = Limits(
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_sampled=config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self.sealed = seal(self.program, limits, self.backend.table)

    @abc.abstractmethod
    def _choose_backend(self, config: EngineConfig) -> Backend:
        """The backend that the config names."""

    # -- loading ------------------------------------------------------------------------------

    @property
    def memory(self) -> DeviceMemory:
        """What was allocated; `load` must have been called."""
        assert self._memory is not None, "load() comes first"
        return self._memory

    @property
    def weight_formats(self) -> list[Format]:
        """Formats of the matrices, the one that most weights have first."""
        counts: Counter[Format] = Counter()
        for weight in self.program.weights:
            if len(weight.shape) > 1:
                counts[weight.format] += math.prod(weight.shape)
        return [format_ for format_, _ in counts.most_common()]

    def load(self, num_blocks: int) -> None:
        """Allocate all memory, with KV for `num_blocks` blocks, and read the weights."""
        try:
            memory = self._allocate(num_blocks)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise InsufficientMemoryError(
                f"the machine has the memory free, but this process could not get it: {str(error)[:200]}. "
                "Raise its limit (ulimit -v), or lower --kv-cache-gib or --max-model-len"
            ) from error
        self._read_weights(memory)
        for rope in self.program.ropes:
            start = self.sealed.rope_offsets[rope.id]
            table = memory.weights[start : start + rope.nbytes].view(torch.float32)
            table.copy_(torch.from_numpy(cos_sin(rope).reshape(-1)))
        self._memory = memory
        self.backend.bind(self.sealed, memory, self.inputs)

    def _read_weights(self, memory: DeviceMemory) -> None:
        """Pack all parameters, with a progress bar where that takes long: when they are quantised."""
        nbytes, quantized = self.backend.table.weight_nbytes, self.checkpoint.quantized_on_load
        slow = {w.id: nbytes(w) for w in self.program.weights if not quantized.isdisjoint(w.parts)}
        total = sum(slow.values())
        done = 0
        with progress_bar(f"Quantising {self.checkpoint.path.name}", total, enabled=total > 0) as show:
            for weight in self.program.weights:
                start = self.sealed.weight_offsets[weight.id]
                out = memory.weights[start : start + nbytes(weight)]
                try:
                    self.backend.pack_weight(weight, self._parts[weight.id], out)
                except ModelLoadError as error:
                    raise type(error)(f"{self.checkpoint.path}: weight {weight.name!r}: {error}") from error
                if weight.offset:  # every backend keeps vectors as plain f32
                    out.view(torch.float32)[: weight.shape[0]] += weight.offset
                done += slow.get(weight.id, 0)
                show(done)

    @abc.abstractmethod
    def _allocate(self, num_blocks: int) -> DeviceMemory:
        """Memory on the runner's device."""

    def close(self) -> None:
        """Stop the backend and unmap the checkpoint."""
        self.backend.close()
        self.checkpoint.close()

    # -- steps --------------------------------------------------------------------------------

    def execute(self, plan: SchedulerOutput) -> None:
        """Apply a plan's diffs and run its forward."""
        self._apply(plan)
        step_inputs.fill(self.inputs, plan, self.states, rope_boundary=self.program.rope_boundary)
        logits = self.backend.run(plan.num_tokens, len(plan.rows), plan.num_sampled)
        self._pending = (plan, logits)

    def sample(self) -> ModelRunnerOutput:
        """Sample a token for each row of the executed plan that reached its end, and look up the logprobs
        of prompts."""
        assert self._pending is not None, "execute() comes first"
        plan, logits = self._pending
        self._pending = None
        values = logits.numpy()  # in the order that step_inputs gives them
        states, rows, positions, places = self.states, [], [], []
        prompts, place = [], 0
        for step in plan.rows:
            first, end = step.prompt_logits
            if first < end:
                prompts.append(self._prompt_logprobs(step, iter(values[place : place + end - first])))
                place += end - first
            if step.samples:
                rows.append(states.sampling(states.row(step.request_id)))
                positions.append(step.start + step.num_tokens)
                places.append(place)
                place += 1
        sampled = sample([values[i] for i in places] if prompts else values, rows, positions, self._choose)
        for token in sampled:
            states.write_token(token.request_id, token.position, token.token_id)
        return ModelRunnerOutput(step=plan.step, sampled=sampled, prompt_logprobs=prompts)

    def _prompt_logprobs(self, step: RowStep, logits: Iterator[npt.NDArray[np.float32]]) -> PromptLogprobs:
        row = self.states.row(step.request_id)
        first, end = step.prompt_logits
        ids = self.states.token_ids[row, first + 1 : end + 1].tolist()
        count = self.states.sampling(row).params.prompt_logprobs or 0
        return prompt_logprobs(step.request_id, first + 1, ids, logits, count)

    def _apply(self, plan: SchedulerOutput) -> None:
        if plan.reset:
            self.states.reset()
        for request_id in plan.dropped:
            self.states.drop(request_id)
        for new in plan.new_rows:
            self.states.add(new)
        for step in plan.rows:
            self.states.write_blocks(step)

    # -- alone --------------------------------------------------------------------------------

    def predict(self, ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Logits [batch, seq, vocab] of token ids [batch, seq], without an engine.

        InvalidRequestError for rows of different lengths, empty or beyond the context, or ids outside
        the vocabulary. Not to be mixed with execute(): it writes to the same KV blocks.
        """
        length = _check_ids(ids, self.program.vocab_size, self.max_model_len)
        if self._memory is None:
            self.load(self.sealed.limits.max_blocks * len(self.program.kv_groups))
        out = np.empty((len(ids), length, self.program.vocab_size), np.float32)
        for row, tokens in zip(out, ids, strict=True):
            self._predict_row(np.asarray(tokens, np.int32), row)
        return out

    def _predict_row(self, tokens: npt.NDArray[np.int32], out: npt.NDArray[np.float32]) -> None:
        inputs, limits = self.inputs, self.sealed.limits
        chunk = min(limits.max_tokens, limits.max_sampled)
        boundary = self.program.rope_boundary
        first_rope_row = boundary if boundary is not None and len(tokens) > boundary else 0
        # Groups share storages, so a block belongs to one of them.
        first_block = np.arange(len(self.program.kv_groups))[:, None] * limits.max_blocks
        inputs.block_table[:, 0, :] = first_block + np.arange(limits.max_blocks)
        for start in range(0, len(tokens), chunk):
            stop = min(start + chunk, len(tokens))
            count = stop - start
            inputs.token_ids[:count] = tokens[start:stop]
            inputs.positions[:count] = np.arange(start, stop)
            inputs.rope_rows[:count] = inputs.positions[:count] + first_rope_row
            inputs.slot_mapping[:, :count] = first_block * BLOCK_SIZE + np.arange(start, stop)
            inputs.cu_q[:2] = 0, count
            inputs.seq_lens[0] = stop
            inputs.sampled_rows[:count] = np.arange(count)
            out[start:stop] = self.backend.run(count, 1, count).numpy()


def _parts(checkpoint: Checkpoint, weight: Weight) -> list[WeightRows]:
    """The tensors that a weight is stacked from; CheckpointError if they don't add up to its shape."""
    rows = sum(checkpoint.shape(part)[0] for part in weight.parts)
    if rows != weight.shape[0]:
        raise CheckpointError(
            f"{checkpoint.path.name}: the rows of {', '.join(weight.parts)} are {rows} in all, but the "
            f"model's hyperparameters make it {weight.shape[0]}"
        )
    return [checkpoint.rows(part, weight.shape) for part in weight.parts]


def _runner_class(device: str) -> type[ModelRunner]:
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device is {device!r}; this version runs on the CPU only: write auto or cpu")
    from octavo.runner.cpu_model_runner import CPUModelRunner  # it imports this module

    return CPUModelRunner


def _check_ids(ids: Sequence[Sequence[int]], vocab_size: int, max_model_len: int) -> int:
    if not all(isinstance(row, Sized) for row in ids):
        raise InvalidRequestError("predict() wants a batch of rows of token ids, such as [[1, 2, 3]]")
    lengths = {len(row) for row in ids}
    if len(lengths) != 1:
        raise InvalidRequestError(
            f"predict() wants a batch of equally long rows; these have {sorted(lengths) or 'no'} tokens. "
            "Call it once for each length"
        )
    length = lengths.pop()
    if not 0 < length <= max_model_len:
        raise InvalidRequestError(f"predict() takes 1..{max_model_len} tokens a row, got {length}")
    for row in ids:
        for token in row:
            if not isinstance(token, int | np.integer):
                raise InvalidRequestError(f"token {token!r} is a {type(token).__name__}; ids are integers")
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(f"token {token} is outside the vocabulary, 0..{vocab_size - 1}")
    return length


def _max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    trained = int(checkpoint.config["max_position_embeddings"])
    if config.max_model_len > trained:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {trained} positions that "
            f"{checkpoint.path.name} was trained for"
        )
    return config.max_model_len or trained


def _kv_dtype(config: EngineConfig, backend: Backend) -> DType:
    if config.kv_dtype == "auto":
        return DType.F32 if backend.name == "torch" else DType.F16
    return DType(config.kv_dtype)
