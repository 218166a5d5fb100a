"""`octavo chat URL`: the same conversation, with the model somewhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_cli import OCTAVO, Result, octavo

from octavo import LLM, SamplingParams
from openai_server import Reply, Script, ScriptedServer, scripted_server
from serving import serve
from terminal import CTRL_C, CTRL_D, at_terminal


async def echo(body: Any, reply: Reply) -> None:
    await reply.stream("so: ", body["messages"][-1]["content"])


def talk(script: Script, *flags: str, stdin: str, **environ: str) -> tuple[Result, ScriptedServer]:
    with scripted_server(script) as server:
        return octavo("chat", server.url, *flags, stdin=stdin, **environ), server


def posted(server: ScriptedServer) -> list[Any]:
    return [request.body for request in server.requests if request.method == "POST"]


def test_a_conversation() -> None:
    result, server = talk(echo, "--system", "be brief", stdin="one\n\ntwo\n/clear\nthree\n/exit\nnever\n")
    assert (result.code, result.out) == (0, "so: one\nso: two\nso: three\n")
    assert "scripted at http://127.0.0.1" in result.err
    assert "7 prompt tokens (0 cached), first token " in result.err
    assert ", 2 tokens at " in result.err
    system = {"role": "system", "content": "be brief"}
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "so: one"}]
    assert [body["messages"] for body in posted(server)] == [
        [system, turns[0]],
        [system, *turns, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "three"}],
    ]


def test_what_is_sent() -> None:
    _, server = talk(echo, stdin="hi\n")
    assert [request.path for request in server.requests] == ["/v1/models", "/v1/chat/completions"]
    (body,) = posted(server)
    assert body.pop("messages") == [{"role": "user", "content": "hi"}]
    plain = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
    assert body == {"model": "scripted", **plain}

    flags = ["--temperature", "0.5", "--top-k", "9", "--seed", "3", "--max-tokens", "5", "--stop", "x"]
    _, server = talk(echo, "--model", "other", "--api-key", "secret", *flags, stdin="hi\n")
    (request,) = server.requests  # the name was given
    assert request.headers["authorization"] == "Bearer secret"
    sampling = {"temperature": 0.5, "top_k": 9, "seed": 3, "max_tokens": 5, "stop": ["x"]}
    assert {key: request.body[key] for key in sampling} == sampling
    assert request.body["model"] == "other"


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_ways_to_give_the_url(ending: str) -> None:
    with scripted_server(echo) as server:
        for place in ([server.url + ending], ["--model", server.url + ending]):
            result = octavo("chat", *place, stdin="hi\n", OPENAI_API_KEY="from-environ")
            assert (result.code, result.out) == (0, "so: hi\n"), result.err
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer from-environ"}


def test_a_proxy_is_not_asked_for_a_server_on_this_machine() -> None:
    proxy = "http://127.0.0.1:9"  # where nobody listens
    environ = {"HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": "", "no_proxy": ""}
    with scripted_server(echo) as server:
        for host in ("127.0.0.1", "localhost"):
            url = server.url.replace("127.0.0.1", host)
            result = octavo("chat", url, stdin="hi\n", **environ)
            assert (result.code, result.out) == (0, "so: hi\n"), result.err
    result = octavo("chat", "http://example.invalid", stdin="hi\n", **environ)
    assert result.code == 1
    assert "refused" in result.err  # by the proxy's machine: no name was looked up


MISTAKES: list[tuple[list[str], str]] = [
    (["http://"], "'http://' is no URL of a server"),
    (["http://x:port"], "is no URL of a server"),
    (["http://user:password@x"], "is no URL of a server"),
    (["http://localhost:1", "--threads", "1", "--max-num-seqs", "2"], "--max-num-seqs, --threads: the model"),
    (["http://localhost:1"], "nothing answers at http://localhost:1"),
    (["http://localhost:1", "--temperature", "-1"], "temperature is -1"),
    (["http://localhost:1", "--api-key", "schlüssel"], "the API key has characters"),
    (["smollm2-135m-instruct", "--api-key", "k"], "--api-key is for a server"),
    (["a.gguf", "--model", "b.gguf"], "the model is given twice, as 'a.gguf' and as --model 'b.gguf'"),
    (["a.gguf", "--model", "http://localhost:1"], "the model is given twice"),
    (["/nowhere/x.gguf"], "no file '/nowhere/x.gguf'"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[says[:40] for _, says in MISTAKES])
def test_a_mistake_is_one_sentence(arguments: list[str], says: str) -> None:
    result = octavo("chat", *arguments, stdin="hi\n")
    assert (result.code, result.out) == (1, "")
    assert says in result.err
    assert result.err.startswith("error:")
    assert result.err.count("\n") == 1


def failing(status: int, message: str, **headers: str) -> Script:
    async def script(body: Any, reply: Reply) -> None:
        await reply.json({"error": {"message": message}}, status, **headers)

    return script


async def cut(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("half")
    reply.cut()


async def stop_early(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("half")
    await reply.raw(b"0\r\n\r\n")


async def error_in_stream(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("half")
    await reply.event({"error": {"message": "[NaN] logits", "code": 500}})
    await reply.done()


async def rubbish(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.body(b"data: <html>\n\n")


FAILURES: list[tuple[Script, str, str]] = [
    (failing(400, "the context holds 256"), "answers 400: the context holds 256", ""),
    (failing(401, "who are you"), "answers 401: who are you. Give the server's key with --api-key", ""),
    (failing(404, "no model 'm'"), "no model 'm'. Look at the URL and at the model's name", ""),
    (failing(429, "full", Retry_After="7"), "answers 429: full. Try again in 7 s", ""),
    (failing(503, "draining"), "answers 503: draining. Try again later", ""),
    (cut, "broke (", "half\n"),
    (stop_early, "ended the answer before it was complete", "half\n"),
    (error_in_stream, "the server gave up: [NaN] logits", "half\n"),
    (rubbish, "sent what is no chunk of an answer: b'<html>'", ""),
]


@pytest.mark.parametrize(("failure", "says", "shown"), FAILURES, ids=[says[:30] for _, says, _ in FAILURES])
def test_a_failure_ends_an_answer_but_not_the_chat(failure: Script, says: str, shown: str) -> None:
    async def script(body: Any, reply: Reply) -> None:
        await (failure if body["messages"][-1]["content"] == "fail" else echo)(body, reply)

    result, server = talk(script, stdin="fail\nhi\n")
    assert (result.code, result.out) == (0, f"{shown}so: hi\n"), result.err
    assert says in result.err
    assert "Traceback" not in result.err
    before = [{"role": "user", "content": "fail"}, {"role": "assistant", "content": "half"}] if shown else []
    assert posted(server)[-1]["messages"] == [*before, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("models", [[], {}, {"data": []}, {"data": [{}]}, "x"], ids=str)
def test_a_server_that_names_no_model(models: Any) -> None:
    async def serve_models(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await Reply(writer, "").json(models)
        writer.close()

    async def main() -> Result:
        server = await asyncio.start_server(serve_models, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await asyncio.to_thread(octavo, "chat", url, stdin="hi\n")

    result = asyncio.run(main())
    assert result.code == 1
    assert "names no model; name it with --model" in result.err


def test_ctrl_c_stops_an_answer_at_the_server_too() -> None:
    """At a terminal: the answer is interrupted, the server sees that, and the conversation goes on."""
    ended: list[BaseException] = []

    async def endless(body: Any, reply: Reply) -> None:
        if body["messages"][-1]["content"] != "endless":
            await echo(body, reply)
            return
        await reply.head()
        try:
            while True:
                await reply.text("on and ")
                await asyncio.sleep(0.02)
        except ConnectionError as error:
            ended.append(error)
            raise

    with scripted_server(endless) as server, at_terminal([*OCTAVO, "chat", server.url]) as terminal:
        terminal.wait_for(b"> ")
        terminal.type(b"endless\n")
        terminal.wait_for(b"on and on and")
        terminal.type(CTRL_C)
        terminal.wait_for(b"tokens at")
        terminal.wait_for(b"> ")
        terminal.type(b"hi\n")
        terminal.wait_for(b"so: hi")
        terminal.wait_for(b"> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(30) == 0
    assert len(ended) == 1
    before = posted(server)[-1]["messages"][1]
    assert before["role"] == "assistant"
    assert before["content"].startswith("on and on and")


def test_a_real_server_answers_as_the_model_here_does(tiny_path: Path) -> None:
    turns = ["the cat", "the dog"]
    flags = ["--max-tokens", "8", "--temperature", "1", "--seed", "7"]
    with serve(tiny_path, "--max-model-len", "256") as server:
        result = octavo("chat", server.url, *flags, stdin="\n".join([*turns, "x" * 300, ""]))
    assert result.code == 0, result.err
    params = SamplingParams(temperature=1, seed=7, max_tokens=8)
    messages: list[dict[str, str]] = []
    answers = []
    with LLM(str(tiny_path), threads=1, max_model_len=256) as llm:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answers.append(llm.chat(messages, params, progress=False)[0].text)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert result.out == "".join(answer + "\n" for answer in answers)
    assert "the context holds 256" in result.err
    assert "answers 400" in result.err
