"""Fakes at the engine's real seams.

`ScriptedExecutor` stands where a model runner stands. It takes plans in order, applies their diffs to
rows of its own, and keeps a KV memory in which every slot says what was written there: which group's KV,
for which position, after which prefix. Its "model" is a pure function of seed, prefix and position, so
any answer can be checked against `solo_run`. Rule: it trusts nothing; whatever a real runner would
compute wrongly, or could overwrite while an earlier step still reads it, raises `KVViolation`.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.messages import (
    ModelRunnerOutput,
    NewRow,
    PromptLogprobs,
    RowStep,
    SampledToken,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.program.ir import BLOCK_SIZE, KVGroup
from octavo.request import FinishReason

#: Token ids that the fake model samples.
VOCAB_SIZE = 24

#: A token's KV: (group, position, token id, hash of the whole prefix that ends with it).
Cell = tuple[int, int, int, int]


class InjectedFault(RuntimeError):
    """The failure of a step that the test asked for."""


class KVViolation(AssertionError):
    """A plan that would make a real runner compute something wrong."""


def require(condition: bool, message: str) -> None:
    """Raise KVViolation with `message` unless the condition holds."""
    if not condition:
        raise KVViolation(message)


# -- the model ----------------------------------------------------------------------------------


def empty_prefix(salt: str, *, long_rope: bool = False) -> int:
    """The hash of no tokens at all. The salt is in it, so KV of another tenant never passes, and so is
    the variant of the rope."""
    return zlib.crc32(salt.encode() + b"\0long" * long_rope)


def extend_prefix(prefix: int, token_id: int) -> int:
    """The hash of a prefix with one more token."""
    return hash((prefix, token_id))  # of ints: the same in every process


def next_token(seed: int, prefix: int, position: int) -> int:
    """The token that the fake model samples for `position`, after `prefix`."""
    mixed = hash((seed, prefix, position))
    return (mixed ^ (mixed >> 29)) % VOCAB_SIZE


def solo_run(
    prompt_ids: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    salt: str = "",
    rope_boundary: int | None = None,
) -> tuple[list[int], FinishReason]:
    """What a request must answer, computed by itself: its output ids and why it ends."""
    output: list[int] = []
    while len(output) < max_tokens:
        known = [*prompt_ids, *output]
        prefix = empty_prefix(salt, long_rope=rope_boundary is not None and len(known) > rope_boundary)
        for token_id in known:
            prefix = extend_prefix(prefix, token_id)
        output.append(next_token(seed, prefix, len(known)))
        if output[-1] in stop_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def prompt_logprobs(prompt_ids: Sequence[int], salt: str = "") -> list[TokenLogprobs]:
    """What the fake model says of each token of a prompt but the first: its rank is a hash of what comes
    before."""
    entries, prefix = [], empty_prefix(salt)
    for before, token_id in itertools.pairwise(prompt_ids):
        prefix = extend_prefix(prefix, before)
        entries.append(TokenLogprobs(token_id=token_id, logprob=-1.0, rank=prefix, top=[]))
    return entries


# -- the runner ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Row:
    """A request's state in the runner."""

    new: NewRow
    tables: list[list[int]]  # per group; -1 where nothing was ever written
    cells: list[list[Cell]]  # per group: what the KV memory must hold
    prefix: int
    tokens: list[int] = field(default_factory=list)
    tainted: set[str] = field(default_factory=set)  # poisoned requests whose KV it shared by then

    def append(self, token_id: int) -> None:
        self.prefix = extend_prefix(self.prefix, token_id)
        for group, cells in enumerate(self.cells):
            cells.append((group, len(self.tokens), token_id, self.prefix))
        self.tokens.append(token_id)


@dataclass(eq=False)
class _Job:
    """A row's part of a step, with its addresses resolved when the plan came."""

    row: _Row
    step: RowStep
    tables: list[list[int]]
    touched: set[int]  # blocks that it reads or writes
    written: set[int]

    @property
    def end(self) -> int:
        return self.step.start + self.step.num_tokens


class ScriptedExecutor:
    """Runs plans as a faithful runner would, one or more steps behind.

    submit(plan) applies the plan's diffs and queues it; collect() executes the oldest queued plan and
    returns its result. max_rows: rows that the runner has. salt_of: the cache salt behind a request id,
    which no message tells a runner. rope_boundary: sequences of more tokens than this have another KV, from
    their first token on. With `apply_twice` set, diffs are applied twice.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVGroup],
        *,
        max_rows: int,
        salt_of: Callable[[str], str] = lambda _: "",
        rope_boundary: int | None = None,
    ) -> None:
        self.num_executed = 0
        self.apply_twice = False
        self._num_blocks = num_blocks
        self._groups = tuple(groups)
        self._max_rows = max_rows
        self._salt_of = salt_of
        self._rope_boundary = rope_boundary
        self._rows: dict[str, _Row] = {}
        self._queue: deque[tuple[SchedulerOutput, list[_Job]]] = deque()
        self._memory: list[Cell | None] = [None] * (num_blocks * BLOCK_SIZE)
        self._writers: list[str] = [""] * num_blocks
        self._faults: set[int] = set()
        self._errors: set[str] = set()
        self._poisoned: dict[str, set[str]] = {}  # request id -> requests that may share its KV
        self._last_step = 0
        self._lost = False  # a step raised, so the rows can't be trusted

    @property
    def num_in_flight(self) -> int:
        """Plans submitted and not collected."""
        return len(self._queue)

    @property
    def row_ids(self) -> list[str]:
        """Requests that have a row."""
        return list(self._rows)

    def raise_on(self, step: int) -> None:
        """Let a step raise InjectedFault when it is executed."""
        self._faults.add(step)

    def error_on(self, request_id: str) -> None:
        """Let the next token of a request come back as an error."""
        self._errors.add(request_id)

    def poison(self, request_id: str) -> None:
        """KV that a request wrote is wrong: no request may come to share it that doesn't already."""
        rows = [*self._rows.values(), *(job.row for _, jobs in self._queue for job in jobs)]
        for row in rows:
            row.tainted.add(request_id)
        self._poisoned[request_id] = set(self._rows)

    def tables(self, request_id: str) -> list[list[int]]:
        """A row's block tables, to look at."""
        return [list(table) for table in self._rows[request_id].tables]

    # -- plans ----------------------------------------------------------------------------------

    def submit(self, plan: SchedulerOutput) -> None:
        """Take the next plan. Raises KVViolation where it can't be right."""
        require(plan.step > self._last_step, f"step {plan.step} comes after step {self._last_step}")
        require(plan.reset or not self._lost, f"step {plan.step} follows a failed one without a reset")
        self._last_step, self._lost = plan.step, False
        ids = [step.request_id for step in plan.rows]
        require(len(ids) == len(set(ids)) > 0, f"step {plan.step}: rows {ids}")
        require(plan.num_tokens == sum(step.num_tokens for step in plan.rows), f"step {plan.step}: sum")
        self._apply(plan, again=False)
        if self.apply_twice:
            before = {name: self.tables(name) for name in self._rows}
            self._apply(plan, again=True)
            require(before == {name: self.tables(name) for name in self._rows}, "a diff is not absolute")
        jobs: list[_Job] = []
        for step in plan.rows:
            job = self._resolve(step)
            for other in [*(j for _, queued in self._queue for j in queued), *jobs]:
                if other.row is not job.row:
                    clash = (job.written & other.touched) | (other.written & job.touched)
                    require(
                        not clash,
                        f"step {plan.step}: {step.request_id} and {other.step.request_id} of a step in "
                        f"flight meet in blocks {clash}, and one of them writes",
                    )
            jobs.append(job)
        self._queue.append((plan, jobs))

    def _apply(self, plan: SchedulerOutput, *, again: bool) -> None:
        if plan.reset:
            self._rows.clear()
        for name in plan.dropped:
            require(self._rows.pop(name, None) is not None or again, f"{name} is dropped but has no row")
            for sharers in self._poisoned.values():
                sharers.discard(name)
        for new in plan.new_rows:
            require(new.request_id not in self._rows or again, f"{new.request_id} has a row already")
            row = self._rows[new.request_id] = _Row(
                new,
                tables=[[] for _ in self._groups],
                cells=[[] for _ in self._groups],
                prefix=empty_prefix(
                    self._salt_of(new.request_id),
                    long_rope=self._is_long(len(new.prompt_ids) + len(new.output_ids)),
                ),
                tainted={name for name, sharers in self._poisoned.items() if new.request_id in sharers},
            )
            for token_id in [*new.prompt_ids, *new.output_ids]:
                row.append(token_id)
        require(len(self._rows) <= self._max_rows, f"{len(self._rows)} rows; there are {self._max_rows}")
        for step in plan.rows:
            require(step.request_id in self._rows, f"{step.request_id} has no row")
            tables = self._rows[step.request_id].tables
            for table, (index, ids) in zip(tables, step.block_writes, strict=True):
                require(all(0 <= block < self._num_blocks for block in ids), f"no such blocks: {ids}")
                table.extend([-1] * (index + len(ids) - len(table)))
                table[index : index + len(ids)] = ids

    def _is_long(self, num_tokens: int) -> bool:
        return self._rope_boundary is not None and num_tokens > self._rope_boundary

    def _resolve(self, step: RowStep) -> _Job:
        row = self._rows[step.request_id]
        end = step.start + step.num_tokens
        require(step.num_tokens > 0, f"{step.request_id} runs no tokens")
        touched, written = set(), set()
        for group, table in zip(self._groups, row.tables, strict=True):
            require(len(table) * BLOCK_SIZE >= end, f"{step.request_id}: the block table ends before {end}")
            first = _first_visible(group, step.start) // BLOCK_SIZE
            touched.update(table[first : -(-end // BLOCK_SIZE)])
            written.update(table[step.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
        require(-1 not in touched, f"{step.request_id}: a block that it reads was never written to its table")
        return _Job(row, step, [list(table) for table in row.tables], touched, written)

    # -- execution ------------------------------------------------------------------------------

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Submit a plan and execute it, with nothing else in flight."""
        require(not self._queue, "other steps are in flight")
        self.submit(plan)
        return self.collect()

    def collect(self) -> ModelRunnerOutput:
        """Execute the oldest plan. A step told to raise leaves rubbish wherever it, and those queued
        behind it, were to write, and forgets the rows."""
        plan, jobs = self._queue.popleft()
        if plan.step in self._faults:
            for job in [*jobs, *(j for _, queued in self._queue for j in queued)]:
                for block in job.written:
                    self._scribble(block, job)
            self._queue.clear()
            self._rows.clear()
            self._lost = True
            raise InjectedFault(f"step {plan.step} was told to raise")
        for job in jobs:
            self._write(job)
        for job in jobs:  # as attention does: after every row's KV of this step was stored
            self._read(job)
        self.num_executed += 1
        return ModelRunnerOutput(
            step=plan.step,
            prompt_logprobs=[self._prompt_logprobs(j) for j in jobs if len(range(*j.step.prompt_logits))],
            sampled=[self._sample(j) for j in jobs if j.step.samples],
        )

    def _prompt_logprobs(self, job: _Job) -> PromptLogprobs:
        name, (first, end) = job.step.request_id, job.step.prompt_logits
        require(job.step.start <= first < end <= job.end, f"{name}: logits of [{first}, {end}) are not there")
        entries = prompt_logprobs(job.row.new.prompt_ids, self._salt_of(name))[first:end]
        return PromptLogprobs(request_id=name, start=first + 1, logprobs=entries)

    def _scribble(self, block: int, job: _Job) -> None:
        for table in job.tables:
            if block in table:
                first = max(table.index(block) * BLOCK_SIZE, job.step.start)
                for position in range(first, min(job.end, (table.index(block) + 1) * BLOCK_SIZE)):
                    self._memory[block * BLOCK_SIZE + position % BLOCK_SIZE] = None

    def _write(self, job: _Job) -> None:
        row, step = job.row, job.step
        require(job.end <= len(row.tokens), f"{step.request_id}: no token is known before {job.end}")
        require(step.long_rope == self._is_long(len(row.tokens)), f"{step.request_id}: another rope")
        samples = job.end == len(row.tokens) and row.new.params.max_tokens != 0
        require(step.samples == samples, f"{step.request_id}: samples={step.samples}")
        for table, cells in zip(job.tables, row.cells, strict=True):
            for position in range(step.start, job.end):
                block = table[position // BLOCK_SIZE]
                self._memory[block * BLOCK_SIZE + position % BLOCK_SIZE] = cells[position]
                self._writers[block] = step.request_id

    def _read(self, job: _Job) -> None:
        for group, table, cells in zip(self._groups, job.tables, job.row.cells, strict=True):
            position = _first_visible(group, job.step.start)
            while position < job.end:
                stop = min(job.end, (position // BLOCK_SIZE + 1) * BLOCK_SIZE)
                block = table[position // BLOCK_SIZE]
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                found, wanted = self._memory[slot : slot + stop - position], cells[position:stop]
                if found != wanted:
                    raise KVViolation(
                        f"{job.step.request_id} reads {found} in block {block} for its positions "
                        f"[{position}, {stop}), which are {wanted}"
                    )
                writer = self._writers[block]
                bad = writer in self._poisoned and writer not in job.row.tainted
                require(not bad, f"{job.step.request_id} reads KV that {writer} wrote and that is wrong")
                position = stop

    def _sample(self, job: _Job) -> SampledToken:
        row, name = job.row, job.step.request_id
        token_id = next_token(row.new.params.seed or 0, row.prefix, len(row.tokens))
        row.append(token_id)
        error = "the logits are NaN" if name in self._errors else None
        self._errors.discard(name)
        return SampledToken(request_id=name, position=job.end, token_id=token_id, error=error)


def _first_visible(group: KVGroup, position: int) -> int:
    """The first position that a token at `position` sees."""
    return 0 if group.window is None else max(0, position - group.window + 1)
