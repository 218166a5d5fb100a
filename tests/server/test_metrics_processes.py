"""Metrics where the engine, and the front ends, are processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from octavo.observability.histogram import Histogram
from octavo.observability.stats import ServerStats
from octavo.server import peers
from octavo.server.peers import FrontStats, Peers
from scraping import Scrape
from serving import ENDLESS, Server, serve

BODY = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 3, "logit_bias": ENDLESS}


def scrape(server: Server) -> Scrape:
    return Scrape(httpx.get(f"{server.url}/metrics", timeout=10).raise_for_status().text)


def ask(server: Server, **fields: object) -> int:
    return httpx.post(f"{server.url}/v1/chat/completions", json=BODY | fields).status_code


def children(pid: int, module: str) -> list[int]:
    """Processes that a process started to run a module."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and module.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def test_an_engine_that_stands_still_is_not_up_and_the_rest_is_told(tiny_path: Path) -> None:
    with serve(tiny_path) as server:
        assert [ask(server), ask(server, tempature=1)] == [200, 400]
        before = scrape(server)
        assert before("octavo_engine_up") == 1
        assert before("octavo_engine_process_resident_memory_bytes") > 1e6
        assert before("octavo_engine_process_open_fds") > 2
        assert before("octavo_gc_pause_seconds_count", process="engine", generation="2") >= 1  # settling
        assert before.by_label("octavo_tokens_total")["generated"] == 3
        assert before("octavo_step_seconds_count") == 3
        (engine,) = children(server.process.pid, "octavo.engine")
        os.kill(engine, signal.SIGSTOP)
        try:
            stopped = scrape(server)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert stopped("octavo_engine_up") == 0
        assert "octavo_requests_running" not in stopped.families
        assert stopped("octavo_requests_received_total") == 2
        until(lambda: scrape(server)("octavo_engine_up") == 1)
        assert ask(server) == 200
        os.kill(engine, signal.SIGKILL)
        until(lambda: scrape(server)("octavo_engine_up") == 0)
        until(lambda: scrape(server)("octavo_engine_up") == 1, 30)
        assert scrape(server)("octavo_requests_total", reason="length") == 2  # the server's counts go on
        assert scrape(server)("octavo_blocks", state="referenced") == 0


def test_several_front_ends_count_together(tiny_path: Path) -> None:
    with serve(tiny_path, "--api-workers", "2") as server:
        for number in range(12):
            assert ask(server, tempature=1) == 400 if number % 3 == 0 else ask(server) == 200
        time.sleep(peers.PERIOD_SECONDS * 2)
        for _ in range(6):  # whoever answers
            now = scrape(server)
            assert now("octavo_requests_received_total") == 12
            assert now("octavo_requests_total", reason="length") == 8
            assert now("octavo_requests_refused_total", reason="invalid_request") == 4
            assert now("octavo_e2e_seconds_count") == 8
            assert not any(now.by_label("octavo_container_entries").values())
        victim, _ = children(server.process.pid, "octavo.server.worker")
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in children(server.process.pid, "octavo.server.worker"))
        until(lambda: len(children(server.process.pid, "octavo.server.worker")) == 2)
        until(lambda: scrape(server)("octavo_requests_received_total") == 12, 20)


def front(received: int, still_open: int) -> FrontStats:
    histogram = Histogram()
    histogram.observe(0.1, received - still_open)
    counts = histogram.snapshot()
    server = ServerStats(
        received=received,
        open=still_open,
        ends={"stop": received - still_open, "error": 0},
        refusals={"other": 0},
        queue=counts,
        ttft=counts,
        itl=counts,
        e2e=counts,
    )
    return FrontStats(server=server, gc_pauses=[counts] * 3, loop_lag=counts, sizes={"streams": still_open})


def test_a_front_end_that_died_keeps_its_counts_and_fails_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Peers(tmp_path, "own")
    own.tell(front(100, 0))  # an old file of our own is not counted beside us
    for name in ("a", "b"):
        Peers(tmp_path, name).tell(front(10, 4))
    both = own.together(front(5, 1))
    assert (both.server.received, both.server.open, both.sizes) == (25, 9, {"streams": 9})
    assert both.server.ends == {"stop": 16, "error": 0}
    assert both.server.e2e.count == both.gc_pauses[2].count == both.loop_lag.count == 16
    long_ago = time.time() - 60
    os.utime(tmp_path / "a.stats", (long_ago, long_ago))
    both = own.together(front(5, 1))
    assert (both.server.received, both.server.open, both.sizes) == (25, 5, {"streams": 5})
    assert both.server.ends == {"stop": 16, "error": 4}
    assert both.server.received == both.server.open + sum(both.server.ends.values())
    assert (tmp_path / "a.stats").stat().st_mode & 0o077 == 0
    Peers(tmp_path / "gone", "own").tell(own.together(front(1, 0)))  # the server is being taken down
