"""Metrics in Prometheus' text format, or OpenMetrics for those who ask.

Rule: nothing is counted here. Everything is read when Prometheus asks, from numbers kept elsewhere, so that
no gauge can be stale. `METRICS` declares all of ours; docs/metrics.md is made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.observability.histogram import HistogramCounts
from octavo.observability.stats import EngineStats, ServerStats

#: Name: (type, labels, help).
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "octavo_build_info": (
        "gauge",
        ("version", "commit", "torch", "backend", "isa", "model", "fingerprint"),
        "Always 1; its labels say what serves.",
    ),
    "octavo_engine_up": ("gauge", (), "1 while the engine can be asked; without it, its metrics are absent."),
    "octavo_requests_received_total": (
        "counter",
        (),
        "Requests that came: octavo_requests_open, plus the sums of octavo_requests_total and "
        "octavo_requests_refused_total.",
    ),
    "octavo_requests_open": ("gauge", (), "Requests that came and have not ended."),
    "octavo_requests_total": (
        "counter",
        ("reason",),
        "Requests that ended: stop and length were answered, abort left, error failed.",
    ),
    "octavo_requests_refused_total": ("counter", ("reason",), "Requests that were never begun, by why."),
    "octavo_requests_running": ("gauge", (), "Requests in the engine that hold KV blocks."),
    "octavo_requests_waiting": ("gauge", (), "Requests in the engine that wait for KV blocks."),
    "octavo_blocks": (
        "gauge",
        ("state",),
        "KV blocks: referenced by requests, cached and evictable, or free. The sum is all there are.",
    ),
    "octavo_tokens_total": (
        "counter",
        ("source",),
        "Tokens: prompt_computed, prompt_cached (found in the prefix cache), generated (sampled), recomputed "
        "(once more, after a preemption or to resume).",
    ),
    "octavo_preemptions_total": ("counter", (), "Times that a request gave up its blocks to another."),
    "octavo_queue_seconds": ("histogram", (), "From a request's arrival to its first step."),
    "octavo_ttft_seconds": ("histogram", (), "From a request's arrival to its first token."),
    "octavo_itl_seconds": ("histogram", (), "From a token to the next of the same request, for each token."),
    "octavo_e2e_seconds": ("histogram", (), "From a request's arrival to its end, unless it was refused."),
    "octavo_step_seconds": ("histogram", (), "Duration of the engine's steps."),
    "octavo_last_step_age_seconds": ("gauge", (), "Since the last step ended; absent before the first."),
    "octavo_step_running_seconds": ("gauge", (), "How long the present step has been running; 0 between."),
    "octavo_gc_pause_seconds": (
        "histogram",
        ("process", "generation"),
        "Pauses of Python's garbage collector.",
    ),
    "octavo_event_loop_lag_seconds": (
        "histogram",
        (),
        "How late the server's event loop calls what is due, looked at ten times a second.",
    ),
    "octavo_container_entries": (
        "gauge",
        ("container",),
        "Entries of internal containers; all 0 when no request is under way.",
    ),
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is exported, at one moment. engine: None if it can't be asked. gc_pauses: of this
    process, by generation. sizes: of this process's containers."""

    build: Mapping[str, str]
    server: ServerStats
    engine: EngineStats | None
    gc_pauses: list[HistogramCounts]
    loop_lag: HistogramCounts
    sizes: Mapping[str, int]


class Exposition(Collector):
    """A registry that tells one snapshot after the other. pid: of this process."""

    def __init__(self, pid: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._pid = pid
        self._snapshot: Snapshot | None = None
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.registry.register(_EngineProcess(self))

    def render(self, snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
        """A body and its content type, as an Accept header wants it."""
        self._snapshot = snapshot
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Our own metrics."""
        if self._snapshot is not None:
            yield from families(self._snapshot)

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, if it is not this one."""
        engine = None if self._snapshot is None else self._snapshot.engine
        return None if engine is None or engine.pid == self._pid else engine.pid


class _EngineProcess(Collector):
    """Memory, CPU time and files of the engine's process, where it has one of its own."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._collector = ProcessCollector(
            namespace="octavo_engine", pid=lambda: exposition.engine_pid or "self", registry=None
        )

    def collect(self) -> Iterable[Metric]:
        return [] if self._exposition.engine_pid is None else self._collector.collect()


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Our metrics, of one moment."""
    server = snapshot.server
    yield _values("octavo_build_info", {tuple(snapshot.build.values()): 1})
    yield _value("octavo_requests_received_total", server.received)
    yield _value("octavo_requests_open", server.open)
    yield _by_label("octavo_requests_total", server.ends)
    yield _by_label("octavo_requests_refused_total", server.refusals)
    yield _histogram("octavo_queue_seconds", {(): server.queue})
    yield _histogram("octavo_ttft_seconds", {(): server.ttft})
    yield _histogram("octavo_itl_seconds", {(): server.itl})
    yield _histogram("octavo_e2e_seconds", {(): server.e2e})
    yield _histogram("octavo_event_loop_lag_seconds", {(): snapshot.loop_lag})
    engine = snapshot.engine
    pauses = {"server": snapshot.gc_pauses, "engine": [] if engine is None else engine.gc_pauses}
    yield _histogram(
        "octavo_gc_pause_seconds",
        {(process, str(i)): counts for process, of in pauses.items() for i, counts in enumerate(of)},
    )
    sizes = {**snapshot.sizes, **({} if engine is None else engine.sizes)}
    yield _by_label("octavo_container_entries", sizes)
    yield _value("octavo_engine_up", int(engine is not None))
    if engine is not None:
        yield from _engine_families(engine)


def _engine_families(engine: EngineStats) -> Iterator[Metric]:
    blocks, tokens = engine.blocks, engine.tokens
    yield _value("octavo_requests_running", engine.running)
    yield _value("octavo_requests_waiting", engine.waiting)
    yield _by_label(
        "octavo_blocks", {"free": blocks.free, "cached": blocks.cached, "referenced": blocks.referenced}
    )
    yield _by_label("octavo_tokens_total", {name: getattr(tokens, name) for name in tokens.__struct_fields__})
    yield _value("octavo_preemptions_total", engine.preemptions)
    yield _histogram("octavo_step_seconds", {(): engine.step_seconds})
    if engine.seconds_since_step is not None:
        yield _value("octavo_last_step_age_seconds", engine.seconds_since_step)
    yield _value("octavo_step_running_seconds", engine.step_running)


def _value(name: str, value: float) -> Metric:
    return _values(name, {(): value})


def _by_label(name: str, values: Mapping[str, float]) -> Metric:
    return _values(name, {(label,): value for label, value in values.items()})


def _values(name: str, values: Mapping[tuple[str, ...], float]) -> Metric:
    """A counter or gauge with a value for each of some label values."""
    kind, labels, text = METRICS[name]
    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    metric = family(name, text, labels=labels)
    for label_values, value in values.items():
        metric.add_metric(label_values, value)
    return metric


def _histogram(name: str, values: Mapping[tuple[str, ...], HistogramCounts]) -> Metric:
    """A histogram for each of some label values; Prometheus' buckets hold all that are smaller, too."""
    _, labels, text = METRICS[name]
    metric = HistogramMetricFamily(name, text, labels=labels)
    for label_values, counts in values.items():
        buckets, so_far = [], 0
        for bound, count in zip((*counts.bounds, float("inf")), counts.counts, strict=True):
            so_far += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(so_far)))
        metric.add_metric(label_values, buckets, counts.total)
    return metric
