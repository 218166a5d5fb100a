"""What the front end of a server costs: processor time for each streamed token, without the model's.

Starts the server in a process of its own, with the default model's tokenizer and template, and behind it, in
another, a core that computes nothing: in every step each open request gets the next token of a text. So what
is measured is HTTP, output processing and their event loop, and, apart, the threads that talk to the core.
A request's own cost, with one token, is measured too. The load comes from this process, as `octavo bench
serve` makes it.

--interval-ms is the time of a step. 0 sends as fast as the front end goes, which is cheaper for each token:
what several steps brought is then handled together.

--profile adds a run under cProfile, which slows small functions most, and prints where processor time went.
The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from octavo.bench import load_generator
from octavo.bench.datasets import Lengths, synthetic
from octavo.bench.load_generator import CHAT, ENDPOINTS, Load
from octavo.bench.reports import Summary, summarize
from octavo.config.resolve import resolve
from octavo.config.server import ServerConfig
from octavo.engine import core_process
from octavo.engine.build import build_engine
from octavo.engine.core_client import Deliver, OnDeath
from octavo.engine.process_client import Listener, ProcessClient
from octavo.engine.pulse import Pulse
from octavo.messages import EngineOutput, EngineRequest
from octavo.platforms import cpu
from octavo.request import FinishReason
from octavo.server.app import create_app
from octavo.server.serving import run

MODEL = "smollm2-135m-instruct"
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of light. "
)
TOP = 25  # functions of a profile that are shown
WIDTH = 140  # of tables in a file


class ScriptedCore:
    """Stands where an EngineCore stands: each step gives each request the next token of a text."""

    def __init__(self, token_ids: list[int], interval: float) -> None:
        self._token_ids = token_ids
        self._interval = interval
        self._requests: dict[str, list[int]] = {}  # tokens given, tokens wanted
        self._due = 0.0

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: EngineRequest) -> None:
        assert request.params.max_tokens is not None
        self._requests[request.request_id] = [0, request.params.max_tokens]

    def abort(self, request_id: str) -> EngineOutput | None:
        self._requests.pop(request_id, None)
        return None

    def step(self) -> list[EngineOutput]:
        now = time.perf_counter()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + self._interval
        outputs = []
        for request_id, state in list(self._requests.items()):
            token_id = self._token_ids[state[0] % len(self._token_ids)]
            state[0] += 1
            ends = state[0] == state[1]
            reason = FinishReason.LENGTH if ends else None
            outputs.append(
                EngineOutput(request_id=request_id, new_token_ids=[token_id], finish_reason=reason)
            )
            if ends:
                del self._requests[request_id]
        return outputs


class RemoteCore:
    """Stands where an EngineProcess stands; its core is scripted, and in another process too."""

    def __init__(self, interval: float) -> None:
        engine = build_engine(resolve({"model": MODEL, "kv_cache_gib": 0.25, "max_num_seqs": 1}).config)
        engine.core.close()
        self.info, self.inputs, self.outputs = engine.info, engine.inputs, engine.outputs
        self.trouble: str | None = None
        ids = json.dumps(self.inputs.tokenizer.encode(TEXT))
        command = [sys.executable, __file__, "--core", ids, "--interval-ms", str(1e3 * interval)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def connect(self, deliver: Deliver, on_death: OnDeath) -> ProcessClient:
        return ProcessClient(self, deliver, on_death)

    def listen(self, listener: Listener) -> None:
        assert self._process.stdout is not None
        listener.engine_ready(self._process.stdout.readline().strip())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run_core(token_ids: list[int], interval: float) -> None:
    """In a process of its own: the scripted core, reached as a real one is."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        fronts = core_process.FrontEnds(Path(directory))
        print(fronts.address, flush=True)
        core: Any = ScriptedCore(token_ids, interval)
        core_process.serve(core, fronts, Pulse.create(Path(directory) / "pulse"))


def serve(port: int, interval: float) -> None:
    """In a process of its own: the server, and routes that tell its processor time."""
    app = create_app(RemoteCore(interval))
    profile = cProfile.Profile(time.thread_time)  # waiting is no work

    @app.get("/measure/seconds")
    async def seconds() -> dict[str, float]:
        return {"loop": time.thread_time(), "process": time.process_time()}

    @app.get("/measure/profile")
    async def start_profile() -> None:
        profile.enable()

    @app.get("/measure/functions")
    async def functions() -> list[dict[str, Any]]:
        profile.disable()
        return top_functions(pstats.Stats(profile))

    listener = socket.create_server(("127.0.0.1", port))
    run(app, listener, ServerConfig(), on_ready=lambda: print("ready", flush=True), on_drain=lambda _: None)


def top_functions(stats: pstats.Stats) -> list[dict[str, Any]]:
    rows = [
        {"function": name_of(*where), "calls": calls, "own": own, "with_callees": both}
        for where, (_, calls, own, both, _) in stats.stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row["own"])


def name_of(path: str, line: int, name: str) -> str:
    """Where a function is, from the package on."""
    return name if path == "~" else f"{path.split('site-packages/')[-1].split('/src/')[-1]}:{line} {name}"


def put_load(url: str, args: argparse.Namespace, tokens: int = 0) -> Summary:
    load = Load(
        model=MODEL,
        endpoint=args.endpoint,
        concurrency=args.streams,
        num_requests=args.streams * args.rounds,
        extra={"ignore_eos": True},
    )
    lengths = Lengths(tokens or args.tokens, tokens or args.tokens)
    return summarize(
        load_generator.run(url, load, synthetic(prompt_words=Lengths(64, 64), max_tokens=lengths))
    )


def seconds_used(url: str) -> dict[str, float]:
    """Processor time of the server's event loop and of all its threads, so far."""
    answer: dict[str, float] = httpx.get(f"{url}/measure/seconds").raise_for_status().json()
    return answer


def measure(url: str, args: argparse.Namespace) -> dict[str, float]:
    """One run: microseconds for each token and for each request."""
    before = seconds_used(url)
    summary = put_load(url, args)
    between = seconds_used(url)
    short = put_load(url, args, tokens=1)
    after = seconds_used(url)
    for each in (summary, short):
        assert each.completed == each.requests, each.errors
    used = {key: 1e6 * (between[key] - before[key]) / summary.output_tokens for key in before}
    itl = summary.itl_ms
    assert itl is not None
    return {
        "front_end_us": used["loop"],
        "other_threads_us": used["process"] - used["loop"],
        "request_us": 1e6 * (after["loop"] - between["loop"]) / short.requests,
        "client_us": summary.client_us_per_token,
        "tokens_per_s": summary.output_tokens_per_s,
        "itl_p50_ms": itl.p50,
        "itl_p99_ms": itl.p99,
    }


def print_profile(url: str, args: argparse.Namespace, out: Console) -> None:
    httpx.get(f"{url}/measure/profile")
    tokens = put_load(url, args).output_tokens
    functions = httpx.get(f"{url}/measure/functions").json()
    total = sum(row["own"] for row in functions)
    table = Table(title=f"under cProfile: {1e6 * total / tokens:.1f} us a token", box=None)
    for name in ("own us/token", "share", "with callees", "calls/token"):
        table.add_column(name, justify="right")
    table.add_column("function", overflow="fold")
    for row in functions[:TOP]:
        table.add_row(
            f"{1e6 * row['own'] / tokens:.2f}",
            f"{row['own'] / total:.1%}",
            f"{1e6 * row['with_callees'] / tokens:.2f}",
            f"{row['calls'] / tokens:.2f}",
            row["function"],
        )
    out.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="answers at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each stream in a run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--endpoint", choices=sorted(ENDPOINTS), default=CHAT)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=json.loads, metavar="IDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.core:
        run_core(args.core, args.interval_ms / 1e3)
        return
    if args.serve:
        serve(args.serve, args.interval_ms / 1e3)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), "--interval-ms", str(args.interval_ms)]
    out = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    with (
        tempfile.TemporaryFile("w+") as log,  # it has a line for each request
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            if server.stdout.readline() != "ready\n":
                log.seek(0)
                sys.exit(f"the server did not start:\n{log.read()}")
            url = f"http://127.0.0.1:{port}"
            put_load(url, args)  # warms up
            runs = [measure(url, args) for _ in range(args.repeats)]
            if args.profile:
                print_profile(url, args, out)
        finally:
            server.terminate()
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    table = Table(
        "", "median", "least", "most", title=f"{args.streams} streams, a step {args.interval_ms:g} ms"
    )
    for name, median in medians.items():
        values = [run[name] for run in runs]
        table.add_row(name, f"{median:.1f}", f"{min(values):.1f}", f"{max(values):.1f}")
    out.print(table)
    rounded = {name: round(value, 2) for name, value in medians.items()}
    settings = {
        name: getattr(args, name) for name in ("streams", "tokens", "rounds", "repeats", "interval_ms")
    }
    machine = {"cpu": cpu.name(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "frontend", **machine, "endpoint": args.endpoint, **settings, **rounded}))


if __name__ == "__main__":
    main()
