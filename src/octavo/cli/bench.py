"""`octavo bench serve`: load for an OpenAI-compatible server, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import Group, Parameter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from octavo.cli import remote
from octavo.cli.terminal import console, escape
from octavo.errors import ConfigError, RemoteServerError

if TYPE_CHECKING:  # they take a while, and `--help` should not wait for them
    from octavo.bench.datasets import Job
    from octavo.bench.load_generator import Load, Record
    from octavo.bench.reports import Summary

_LOAD = Group("Load", sort_key=0)
_DATA = Group("Data", sort_key=1)
_OBJECTIVES = Group("Objectives", sort_key=2)
_REPORT = Group("Report", sort_key=3)
_REQUESTS = 64  # where nothing says how many
_CONCURRENCY = 16
_PROMPT_WORDS = "128"
_OUTPUT_TOKENS = "64"
_STATISTICS = ("mean", "p50", "p90", "p99", "max")
_WARN_CPU_SHARE = 0.5


def _flag(help_: str, group: Group) -> Parameter:
    return Parameter(help=help_, group=group)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """What is sent, and when."""

    endpoint: Annotated[Literal["chat", "completions"], _flag("Which route gets the load.", _LOAD)] = "chat"
    concurrency: Annotated[
        int | None, _flag("Closed loop: requests at once; 16 unless --rate is given.", _LOAD)
    ] = None
    rate: Annotated[
        float | None, _flag("Open loop: requests a second, whether others have ended or not.", _LOAD)
    ] = None
    arrivals: Annotated[
        Literal["poisson", "constant"] | None, _flag("How --rate spaces requests; poisson.", _LOAD)
    ] = None
    num_requests: Annotated[int | None, _flag("Requests to send; 64 unless --duration is given.", _LOAD)] = (
        None
    )
    duration: Annotated[
        float | None, _flag("Seconds after which no more are sent; open ones are waited for.", _LOAD)
    ] = None
    warmup: Annotated[int, _flag("Requests sent before, and not counted.", _LOAD)] = 0
    timeout: Annotated[float, _flag("Seconds for one answer.", _LOAD)] = 600.0
    retry_refused: Annotated[
        bool, Parameter(help="Do as Retry-After says where the answer is 429.", group=_LOAD, negative="")
    ] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """What is asked."""

    dataset: Annotated[
        Path | None,
        _flag('JSON file in ShareGPT\'s form: [{"conversations": [{"from", "value"}]}]. Else random.', _DATA),
    ] = None
    prompt_words: Annotated[
        str | None, _flag("Words of a random prompt: 128, 32:256, or log:32:1024; 128.", _DATA)
    ] = None
    shared_prefix: Annotated[
        float, _flag("Share of each random prompt, 0 to 1, that is the same for all.", _DATA)
    ] = 0.0
    output_tokens: Annotated[
        str | None, _flag("Tokens of an answer, likewise; 64, or as a dataset's replies have.", _DATA)
    ] = None
    ignore_eos: Annotated[
        bool, _flag("Ask for answers of exactly that length; not every server knows this field.", _DATA)
    ] = True
    temperature: Annotated[float, _flag("Of sampling.", _DATA)] = 0.0
    seed: Annotated[int, _flag("Of data and arrivals.", _DATA)] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ObjectiveFlags:
    """What a request must meet to count as goodput."""

    slo_ttft_ms: Annotated[float | None, _flag("Most milliseconds to the first token.", _OBJECTIVES)] = None
    slo_itl_ms: Annotated[
        float | None, _flag("Most milliseconds between tokens, in a request's mean.", _OBJECTIVES)
    ] = None
    slo_e2e_ms: Annotated[float | None, _flag("Most milliseconds to the end.", _OBJECTIVES)] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Where the numbers go."""

    json: Annotated[
        str | None,
        Parameter(
            help="File to write all numbers to; -: the last line of standard output.",
            group=_REPORT,
            allow_leading_hyphen=True,
        ),
    ] = None
    plot: Annotated[Path | None, _flag("Chart to draw, such as run.svg; needs matplotlib.", _REPORT)] = None


def serve(
    *,
    url: Annotated[str, Parameter(help="The server, such as http://127.0.0.1:8000.", group=_LOAD)],
    model: Annotated[
        str | None, Parameter(help="The model's name there; asked for if not given.", group=_LOAD)
    ] = None,
    api_key: Annotated[str | None, Parameter(help="Its key; else OPENAI_API_KEY's.", group=_LOAD)] = None,
    load: LoadFlags = LoadFlags(),
    data: DataFlags = DataFlags(),
    objectives: ObjectiveFlags = ObjectiveFlags(),
    report: ReportFlags = ReportFlags(),
) -> None:
    """Put load on an OpenAI-compatible server; print throughput, latencies, goodput and errors.

    TTFT: from sending to the first text. ITL: between tokens after that. E2E: to the end of an answer.
    """
    from octavo.bench import load_generator, plots, reports

    _check(load, data, objectives)
    if report.json is not None and not (directory := Path(report.json).parent).is_dir():
        raise ConfigError(f"--json is {report.json!r}, but there is no directory {str(directory)!r}")
    if report.plot is not None:
        plots.check_can_plot(report.plot)
    jobs, key, server_url = _jobs(data), remote.api_key(api_key), remote.base_url(url)
    asked = _load(load, data, model or _served_model(server_url, key))
    with _progress(asked) as progress:
        run = load_generator.run(server_url, asked, jobs, api_key=key, on_end=progress)
    summary = reports.summarize(
        run,
        reports.Objectives(
            ttft_ms=objectives.slo_ttft_ms, itl_ms=objectives.slo_itl_ms, e2e_ms=objectives.slo_e2e_ms
        ),
    )
    _print(summary, Console(highlight=False, emoji=False, stderr=report.json == "-"))
    if report.plot is not None:
        plots.plot(run, report.plot, f"{asked.model} at {server_url}")
    if report.json is not None:
        _write_json(report.json, _as_json(summary, asked, data, objectives, server_url))
    if not summary.completed:
        raise RemoteServerError("no request was answered; the table says why")


def _check(load: LoadFlags, data: DataFlags, objectives: ObjectiveFlags) -> None:
    """Refuse what can't be, and what would have no effect."""
    if load.rate is not None and load.concurrency is not None:
        raise ConfigError("--concurrency and --rate are two kinds of load; give one of them")
    if load.arrivals is not None and load.rate is None:
        raise ConfigError(f"--arrivals {load.arrivals} needs --rate; without, answers set the pace")
    if data.dataset is not None and (data.prompt_words is not None or data.shared_prefix):
        raise ConfigError("--prompt-words and --shared-prefix are for random prompts; leave out --dataset")
    if not 0 <= data.shared_prefix <= 1:
        raise ConfigError(f"--shared-prefix is {data.shared_prefix:g}; it is a share of 0 to 1")
    if load.warmup < 0:
        raise ConfigError(f"--warmup is {load.warmup}; it is a number of requests")
    numbers = {
        "--concurrency": load.concurrency,
        "--rate": load.rate,
        "--num-requests": load.num_requests,
        "--duration": load.duration,
        "--timeout": load.timeout,
        "--slo-ttft-ms": objectives.slo_ttft_ms,
        "--slo-itl-ms": objectives.slo_itl_ms,
        "--slo-e2e-ms": objectives.slo_e2e_ms,
    }
    for flag, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} is {value}; it must be above 0")


def _jobs(data: DataFlags) -> Iterator[Job]:
    from octavo.bench.datasets import Lengths, conversations, synthetic

    tokens = None if data.output_tokens is None else Lengths.parse(data.output_tokens, "--output-tokens")
    if data.dataset is not None:
        return conversations(data.dataset, max_tokens=tokens, seed=data.seed)
    return synthetic(
        prompt_words=Lengths.parse(data.prompt_words or _PROMPT_WORDS, "--prompt-words"),
        max_tokens=tokens or Lengths.parse(_OUTPUT_TOKENS, "--output-tokens"),
        shared_prefix=data.shared_prefix,
        seed=data.seed,
    )


def _load(load: LoadFlags, data: DataFlags, model: str) -> Load:
    from octavo.bench.load_generator import Load

    count = load.num_requests
    return Load(
        model=model,
        endpoint=load.endpoint,
        concurrency=load.concurrency or _CONCURRENCY,
        rate=load.rate,
        poisson=load.arrivals != "constant",
        num_requests=_REQUESTS if count is None and load.duration is None else count,
        duration=load.duration,
        warmup=load.warmup,
        extra={"temperature": data.temperature} | ({"ignore_eos": True} if data.ignore_eos else {}),
        wait_when_refused=load.retry_refused,
        timeout=load.timeout,
        seed=data.seed,
    )


def _served_model(url: str, key: str | None) -> str:
    server = remote.RemoteServer(url, key, direct=True)  # as the load goes
    try:
        return server.model()
    finally:
        server.close()


@contextmanager
def _progress(load: Load) -> Iterator[Callable[[Record], None]]:
    """A bar that moves when a request ends."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        console=console(),
        transient=True,
        refresh_per_second=2,  # drawing costs what is to be measured
    )
    failed = 0
    with bar:
        task = bar.add_task("Requests", total=load.num_requests, failed="")

        def advance(record: Record) -> None:
            nonlocal failed
            failed += record.error is not None
            bar.update(task, advance=1, failed=f"[red]{failed} failed[/]" if failed else "")

        yield advance


def _print(summary: Summary, out: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _rows(summary):
        table.add_row(name, value)
    out.print(table)
    if summary.ttft_ms is not None:
        out.print()
        out.print(_latency_table(summary))
    for kind, error in summary.errors.items():
        out.print(f"[red]{error.count} x {escape(kind)}:[/] {escape(error.example)}", soft_wrap=True)
    if summary.chunks_as_tokens:
        out.print("[yellow]note:[/] the server sends no usage; its chunks were counted as tokens")
    if summary.client_cpu_share > _WARN_CPU_SHARE:
        out.print(
            f"[yellow]note:[/] this program used {summary.client_cpu_share:.0%} of a core; latencies may be "
            "its own"
        )


def _rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "requests", f"{summary.completed} of {summary.requests} answered in {summary.seconds:.2f} s"
    if summary.refusals:
        yield "refusals", f"{summary.refusals} (429)"
    cached = f" ({summary.cached_tokens:,} cached)" if summary.cached_tokens else ""
    yield "prompt tokens", f"{summary.prompt_tokens:,}{cached}"
    yield "output tokens", f"{summary.output_tokens:,}"
    yield "requests/s", f"{summary.requests_per_s:,.2f}"
    yield "output tokens/s", f"{summary.output_tokens_per_s:,.1f}"
    yield "total tokens/s", f"{summary.total_tokens_per_s:,.1f}"
    if summary.goodput is not None:
        good = summary.goodput
        yield "goodput", f"{good.requests_per_s:,.2f} requests/s, {good.share:.1%} of all"


def _latency_table(summary: Summary) -> Table:
    table = Table("ms", *_STATISTICS, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, latency in (("TTFT", summary.ttft_ms), ("ITL", summary.itl_ms), ("E2E", summary.e2e_ms)):
        if latency is not None:
            table.add_row(name, *(f"{getattr(latency, each):,.2f}" for each in _STATISTICS))
    return table


def _as_json(
    summary: Summary, load: Load, data: DataFlags, objectives: ObjectiveFlags, url: str
) -> dict[str, Any]:
    settings = {"load": asdict(load), "data": asdict(data), "objectives": asdict(objectives)}
    return {"benchmark": "serve", "url": url, **settings, **msgspec.structs.asdict(summary)}


def _write_json(where: str, value: dict[str, Any]) -> None:
    text = msgspec.json.encode(value, enc_hook=str).decode()
    if where == "-":
        print(text)
        return
    try:
        Path(where).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write --json {where}: {error}") from error
