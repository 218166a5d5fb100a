"""`octavo bench serve`: flags, the table, JSON, the chart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli import octavo

from openai_server import Reply, ScriptedServer, scripted_server


async def answer(body: Any, reply: Reply) -> None:
    prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    if prompt == "fail":
        await reply.json({"error": {"message": "[out] of luck"}}, 500)
    else:
        await reply.stream(*["x"] * body["max_tokens"], delays=[0.002] * body["max_tokens"])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server(answer) as server:
        yield server


def bench(server: ScriptedServer, *flags: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """Run it; the JSON and everything it said beside."""
    result = octavo("bench", "serve", "--url", server.url, "--json", "-", *flags)
    assert result.code == code, result.err
    *before, last = result.out.splitlines()
    assert before == []
    return json.loads(last), result.err


def test_a_closed_loop(server: ScriptedServer) -> None:
    found, table = bench(server, "--num-requests", "6", "--concurrency", "2", "--output-tokens", "5")
    assert (found["requests"], found["completed"], found["output_tokens"]) == (6, 6, 30)
    assert (found["errors"], found["goodput"]) == ({}, None)
    assert found["load"]["model"] == "scripted"  # which the server said
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"] <= found[name]["max"]
    assert 2 <= found["itl_ms"]["p50"] < 100
    for word in ("6 of 6 answered", "output tokens/s", "TTFT", "ITL", "E2E", "p99"):
        assert word in table
    assert "goodput" not in table
    bodies = [request.body for request in server.requests if request.method == "POST"]
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in bodies)


def test_the_table_is_on_standard_output(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = ["--url", server.url, "--num-requests", "2", "--model", "m", "--json", str(file)]
    result = octavo("bench", "serve", *flags, "--output-tokens", "2", "--no-ignore-eos")
    assert result.code == 0, result.err
    assert "2 of 2 answered" in result.out
    assert json.loads(file.read_text())["load"]["model"] == "m"
    assert "ignore_eos" not in server.requests[0].body
    assert all(request.method == "POST" for request in server.requests)


def test_objectives_and_a_chart(server: ScriptedServer, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    flags = ["--num-requests", "4", "--endpoint", "completions", "--output-tokens", "3", "--rate", "200"]
    found, table = bench(server, *flags, "--slo-ttft-ms", "60000", "--plot", str(chart))
    assert found["goodput"]["share"] == 1
    assert "100.0% of all" in table
    text = chart.read_text()
    assert text.lstrip().startswith("<?xml")
    assert "</svg>" in text
    found, _ = bench(server, *flags, "--slo-itl-ms", "0.001")
    assert found["goodput"]["share"] == 0


def test_a_dataset_and_errors(server: ScriptedServer, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "one two three"}]
    failing = [{"from": "human", "value": "fail"}, {"from": "gpt", "value": "x"}]
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"conversations": turns}, {"conversations": failing}]))
    found, table = bench(server, "--dataset", str(file), "--num-requests", "8")
    assert (found["completed"], found["output_tokens"]) == (4, 16)
    assert found["errors"] == {"HTTP 500": {"count": 4, "example": "[out] of luck"}}
    assert "4 x HTTP 500: [out] of luck" in table


def test_nothing_was_answered(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    turns = [{"from": "human", "value": "fail"}, {"from": "gpt", "value": "x"}]
    file.write_text(json.dumps([{"conversations": turns}]))
    found, said = bench(server, "--dataset", str(file), "--num-requests", "2", code=1)
    assert found["completed"] == 0
    assert "error: no request was answered" in said


def test_a_prefix_that_is_shared(server: ScriptedServer) -> None:
    data = ["--prompt-words", "40:60", "--shared-prefix", "0.5", "--output-tokens", "1"]
    bench(server, "--num-requests", "4", *data)
    prompts = {request.body["messages"][0]["content"] for request in server.requests if request.body}
    assert len(prompts) == 4
    assert len({" ".join(prompt.split()[:20]) for prompt in prompts}) == 1


URL = "http://127.0.0.1:1"
MISTAKES: list[tuple[list[str], str]] = [
    ([], "nothing answers at http://127.0.0.1:1"),
    (["--url", "localhost"], "'localhost' is no URL of a server"),
    (["--concurrency", "2", "--rate", "3"], "--concurrency and --rate are two kinds of load"),
    (["--concurrency", "0"], "--concurrency is 0; it must be above 0"),
    (["--rate", "-1"], "--rate is -1.0"),
    (["--rate", "nan"], "--rate is nan"),
    (["--arrivals", "constant"], "--arrivals constant needs --rate"),
    (["--num-requests", "0"], "--num-requests is 0"),
    (["--duration", "inf"], "--duration is inf"),
    (["--warmup", "-1"], "--warmup is -1"),
    (["--timeout", "0"], "--timeout is 0"),
    (["--slo-ttft-ms", "0"], "--slo-ttft-ms is 0"),
    (["--prompt-words", "many"], "--prompt-words is 'many'"),
    (["--output-tokens", "9:3"], "--output-tokens is '9:3'"),
    (["--shared-prefix", "1.5"], "--shared-prefix is 1.5"),
    (["--dataset", "/nowhere.json", "--model", "m"], "can't read the dataset /nowhere.json"),
    (["--dataset", "/nowhere.json", "--prompt-words", "5"], "--prompt-words and --shared-prefix are for"),
    (["--plot", "/nowhere/chart.svg"], "there is no directory '/nowhere'"),
    (["--json", "/nowhere/x.json"], "--json is '/nowhere/x.json', but there is no directory '/nowhere'"),
    (["--plot", "chart.docx"], "its ending must be one of"),
]


@pytest.mark.parametrize(("flags", "says"), MISTAKES, ids=[" ".join(flags) for flags, _ in MISTAKES])
def test_a_mistake_is_one_sentence(flags: list[str], says: str) -> None:
    url = [] if "--url" in flags else ["--url", URL]
    result = octavo("bench", "serve", *url, *flags)
    assert (result.code, result.out) == (1, "")
    assert says in result.err
    assert result.err.startswith("error:")
    assert result.err.count("\n") == 1


def test_numbers_that_cannot_be_written(server: ScriptedServer, tmp_path: Path) -> None:
    flags = ["--url", server.url, "--num-requests", "1", "--output-tokens", "1", "--json", str(tmp_path)]
    result = octavo("bench", "serve", *flags)
    assert result.code == 1
    assert f"can't write --json {tmp_path}" in result.err
    assert "1 of 1 answered" in result.out  # they are not lost


def test_a_chart_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = octavo("bench", "serve", "--url", URL, "--plot", "chart.svg")
    assert result.code == 1
    assert "error: --plot draws with matplotlib, which is not installed" in result.err


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from octavo.bench import load_generator, reports, datasets, plots; "
        "from octavo.cli import bench, remote; "
        "assert not {'torch', 'numpy', 'matplotlib', 'httpx'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
