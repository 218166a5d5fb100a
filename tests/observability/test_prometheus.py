"""The exposition, read by Prometheus' own parsers and by promtool."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from octavo.observability.histogram import SECONDS, Histogram, HistogramCounts
from octavo.observability.prometheus import METRICS, Exposition, Snapshot
from octavo.observability.stats import BlockCounts, EngineStats, ServerStats, TokenCounts
from scraping import Scrape

PROMTOOL = shutil.which("promtool")


def histogram(*values: float) -> HistogramCounts:
    counted = Histogram(SECONDS)
    for value in values:
        counted.observe(value)
    return counted.snapshot()


def engine(pid: int) -> EngineStats:
    return EngineStats(
        running=3,
        waiting=2,
        blocks=BlockCounts(total=10, free=5, cached=1, referenced=4),
        steps=2,
        tokens=TokenCounts(prompt_computed=7, prompt_cached=16, generated=5, recomputed=1),
        preemptions=6,
        ends={"stop": 1},
        step_seconds=histogram(0.003, 0.02),
        seconds_since_step=0.5,
        step_running=0.25,
        pid=pid,
        sizes={"ledger": 5},
        gc_pauses=[] if pid == os.getpid() else [histogram(0.01)] * 3,
    )


def snapshot(of_engine: EngineStats | None) -> Snapshot:
    server = ServerStats(
        received=9,
        open=5,
        ends={"stop": 1, "abort": 1},
        refusals={"invalid_request": 2},
        queue=histogram(0.001, 0.0011, 1000),
        ttft=histogram(),
        itl=histogram(0.01),
        e2e=histogram(3),
    )
    labels = METRICS["octavo_build_info"][1]
    build = {label: f'the "{label}"\n' for label in labels}  # what a text may hold must be escaped
    return Snapshot(build, server, of_engine, [histogram(0.1)] * 3, histogram(0.2), {"streams": 5})


def render(of_engine: EngineStats | None, accept: str = "") -> tuple[str, str]:
    body, content_type = Exposition(os.getpid()).render(snapshot(of_engine), accept)
    return body.decode(), content_type


def test_values_arrive_under_their_names() -> None:
    text, content_type = render(engine(os.getpid()))
    assert content_type.startswith("text/plain; version=0.0.4")
    scrape = Scrape(text)
    assert scrape("octavo_requests_received_total") == 9
    assert scrape.by_label("octavo_requests_total") == {"stop": 1, "abort": 1}
    assert scrape.by_label("octavo_blocks") == {"free": 5, "cached": 1, "referenced": 4}
    assert scrape.by_label("octavo_tokens_total")["prompt_cached"] == 16
    assert scrape.by_label("octavo_container_entries") == {"streams": 5, "ledger": 5}
    assert scrape("octavo_last_step_age_seconds") == 0.5
    assert scrape("octavo_step_running_seconds") == 0.25
    assert scrape("octavo_gc_pause_seconds_count", process="server", generation="2") == 1
    buckets = {"0.001": 1, "0.0025": 2, "150.0": 2, "+Inf": 3}
    assert {le: scrape("octavo_queue_seconds_bucket", le=le) for le in buckets} == buckets
    assert scrape("octavo_queue_seconds_count") == 3
    assert scrape("octavo_queue_seconds_sum") == pytest.approx(1000.0021)
    assert scrape("process_resident_memory_bytes") > 1e6
    assert scrape("process_open_fds") > 2
    assert "octavo_engine_process_open_fds" not in scrape.families


def test_everything_declared_is_exported_and_nothing_else() -> None:
    ours = {name for name in Scrape(render(engine(os.getpid()))[0]).families if name.startswith("octavo_")}
    assert ours == {name.removesuffix("_total") for name in METRICS}  # as the parser calls counters
    for name, (kind, labels, _) in METRICS.items():
        family = Scrape(render(engine(os.getpid()))[0]).families[name.removesuffix("_total")]
        assert family.type == kind
        assert {*family.samples[0].labels} - {"le"} == set(labels), name
        assert (kind == "counter") == name.endswith("_total")


def test_an_engine_in_another_process_shows_that_process() -> None:
    scrape = Scrape(render(engine(os.getppid()))[0])
    assert scrape("octavo_engine_process_resident_memory_bytes") > 0
    assert scrape("octavo_gc_pause_seconds_count", process="engine", generation="0") == 1


def test_an_engine_that_can_not_be_asked_leaves_no_stale_gauge() -> None:
    scrape = Scrape(render(None)[0])
    assert scrape("octavo_engine_up") == 0
    assert scrape("octavo_requests_open") == 5
    for name in ("octavo_requests_running", "octavo_blocks", "octavo_tokens", "octavo_step_seconds"):
        assert name not in scrape.families


def test_openmetrics_for_those_who_ask() -> None:
    text, content_type = render(engine(os.getpid()), "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(text)}
    assert families["octavo_tokens"].type == "counter"
    assert families["octavo_build_info"].samples[0].labels["backend"] == 'the "backend"\n'


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here; Debian's package prometheus has it")
@pytest.mark.parametrize("with_engine", [False, True])
def test_promtool_finds_nothing_to_say(with_engine: bool) -> None:
    assert PROMTOOL is not None
    text, _ = render(engine(os.getppid()) if with_engine else None)
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
