"""Makes the generated pages of docs/ anew: `make docs`. A test checks that they are up to date.

docs/program.md    the listing of the default model's program, and its memory bill
docs/settings.md   every setting of the engine and the server
docs/metrics.md    every metric, and the record of a request's end
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from octavo.backends.base import StepInputs
from octavo.backends.native.table import NativeKernelTable
from octavo.config import env
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.request_record import REFUSALS, RequestRecord
from octavo.kv_cache.sizing import make_bill
from octavo.models.registry import model_builder
from octavo.observability.prometheus import METRICS
from octavo.observability.step_log import NUM_STEPS
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import DType
from octavo.program.planner import Limits, seal
from octavo.program.pricing import OpCost, StepShape, price
from octavo.runner.request_states import RequestStates
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.sources import resolve_model

DOCS = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
_THREADS = 2
_MIB = 1 << 20
_GIB = 1 << 30


def program_page() -> str:
    """docs/program.md, computed without allocating or running anything."""
    resolved = resolve({"model": MODEL})
    config = resolved.config
    checkpoint = open_checkpoint(resolve_model(MODEL, config.cache_path, progress=True))
    builder = ProgramBuilder(checkpoint.architecture, format_of=checkpoint.format_of, kv_dtype=DType.F16)
    context = int(checkpoint.config["max_position_embeddings"])
    program = model_builder(checkpoint.architecture)(builder, checkpoint.config, context)
    limits = Limits(config.max_num_batched_tokens, config.max_num_seqs, config.max_num_seqs, context)
    table = NativeKernelTable(_THREADS)
    sealed = seal(program, limits, table)
    checkpoint.close()
    inputs = StepInputs.allocate(limits, len(program.kv_groups))
    states = RequestStates(limits, len(program.kv_groups))
    bill = make_bill(
        sealed, step_inputs=inputs.nbytes, request_states=states.nbytes, kv_cache_gib=1.0, available=64 * _GIB
    )
    items = "\n".join(f"| {name} | {nbytes:,} | {nbytes / _MIB:.1f} |" for name, nbytes in bill.items)
    shapes = {
        "decode, 1 sequence at 1024": StepShape(1, 1, 1, 1024, 1024),
        "decode, 32 sequences at 1024": StepShape(32, 32, 32, 32 * 1024, 32 * 1024),
        "prefill, 512 tokens": StepShape(512, 1, 1, 512 * 513 // 2, 512),
    }
    costs = "\n".join(
        _cost_row(name, price(program, shape, table.weight_nbytes)) for name, shape in shapes.items()
    )
    return f"""# The default model's program

Made by `make docs`; a test checks it. This is what `{MODEL}` is to Octavo: a listing, built once by
[models/llama.py](../src/octavo/models/llama.py), that every backend interprets.

`%n:type[shape]+offset` is a buffer and its place in the activation arena, `@name` a weight with its format,
`kvN` a layer's cache; what follows `#` is the kernel that the native backend chose ({_THREADS} threads).

## Memory, before a byte is allocated

| purpose | bytes | MiB |
|---|---:|---:|
{items}

## Cost, from the listing alone

| step | GFLOP | weights, MB | KV, MB | activations, MB |
|---|---:|---:|---:|---:|
{costs}

## Listing

```
{sealed.dump().rstrip()}
```
"""


def _cost_row(name: str, costs: list[OpCost]) -> str:
    flops = sum(cost.flops for cost in costs) / 1e9
    columns = (
        sum(getattr(cost, field) for cost in costs) / 1e6
        for field in ("weight_nbytes", "kv_nbytes", "activation_nbytes")
    )
    return f"| {name} | {flops:.2f} | " + " | ".join(f"{value:.1f}" for value in columns) + " |"


def _settings_table(schema: type) -> str:
    rows = "\n".join(
        f"| `--{field.name.replace('_', '-')}` | `{env.variable(field.name)}` | "
        f"`{'' if field.default == () else field.default!r}` | {field.metadata['help']} |"
        for field in dataclasses.fields(schema)
    )
    return f"""| flag | environment | default | what it does |
|---|---|---|---|
{rows}"""


def settings_page() -> str:
    """docs/settings.md."""
    return f"""# Settings

Made by `make docs` from [config/](../src/octavo/config/schema.py); a test checks it. A flag wins over the
environment, and that over the default. `octavo serve --explain-config` prints what is in force and why.

## The engine

In Python the same names are arguments: `LLM("smollm2-135m-instruct", max_num_seqs=64)`.

{_settings_table(EngineConfig)}

## The server

{_settings_table(ServerConfig)}
"""


def metrics_page() -> str:
    """docs/metrics.md."""
    rows = "\n".join(
        f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, (kind, labels, text) in METRICS.items()
    )
    refusals = ", ".join(f"`{reason}`" for reason in REFUSALS)
    fields = ", ".join(f"`{field}`" for field in RequestRecord.__struct_fields__)
    return f"""# Metrics

Made by `make docs` from [observability/prometheus.py](../src/octavo/observability/prometheus.py); a test
checks it. `GET /metrics` answers in Prometheus' text format, or in OpenMetrics where the `Accept` header asks
for that. Nothing is sampled beforehand: every value is computed when asked for, so no gauge is stale.

| metric | type | labels | what it says |
|---|---|---|---|
{rows}

Beside these, `process_*` of Prometheus' own client: resident memory, CPU time, open files of the server's
process; and `octavo_engine_process_*` of the engine's, where it has one of its own.

With `--api-workers` any of them answers for all: requests, times and pauses are sums, those of the others up
to half a second old, and a worker that died keeps its counts. `process_*` is of the one that answered.
Counters of the engine begin at 0 when it is restarted; those of requests go on.

## What adds up

- `octavo_requests_received_total` = `octavo_requests_open` + all `octavo_requests_total` + all
  `octavo_requests_refused_total`. A request is a stream of the engine, or a POST under `/v1/` that never
  became one.
- The sum of `octavo_blocks` is the number of blocks, always.
- `prompt_computed` + `prompt_cached` of `octavo_tokens_total` is what the prompts held that were answered.
- `octavo_tokens_total{{source="generated"}}` is the sum of `generated_tokens` over all records.

Reasons to refuse: {refusals}.

## The record of a request's end

One line of JSON on standard error for each request, whatever became of it, from the logger `octavo.requests`:
{fields}.

`reason` is one of the reasons of `octavo_requests_total`, or `refused`; then `refusal` says why. `queue_ms`,
`prefill_ms` and `decode_ms` are the engine's; `ttft_ms` and `e2e_ms` begin when the request came and end when
its caller was given the token, or left. What e2e has beyond the three is the way to the engine and back; of
requests that their caller left it may have less, since the engine hears of that a step later.

## Slow steps

A step that takes ten times as long as those of its size do, and a tenth of a second at least, is logged as a
warning that says what the engine was doing. Its stacks, sampled while it ran, are in the ring of the last
{NUM_STEPS} steps (`EngineCore.steps`).

## The garbage collector

`octavo serve` freezes what is loaded (`gc.freeze`), so that full collections walk only the requests under
way. `octavo_gc_pause_seconds` shows what is left.
"""


PAGES = {"program.md": program_page, "settings.md": settings_page, "metrics.md": metrics_page}


def main() -> int:
    """Write all pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        print(f"docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
