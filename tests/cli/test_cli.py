"""The `octavo` command: what it prints, where, and how it ends.

Most commands run in this process, through `main`, because loading torch takes longer than all they do.
Where being a process matters, they are one."""

from __future__ import annotations

import dataclasses
import io
import json
import resource
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from terminal import CTRL_C, CTRL_D, at_terminal
from tiny_models import make_llama_gguf

OCTAVO = [sys.executable, "-m", "octavo"]
#: A model that is quick to load: flags for every command that loads one.
QUICK = ["--threads", "1", "--max-model-len", "256"]
HELP_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def octavo(*arguments: str, stdin: str | bytes = "", **environ: str) -> Result:
    """Run `octavo` in this process."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        for name, value in ({"COLUMNS": "80"} | environ).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def octavo_process(*arguments: str, stdin: str = "") -> Result:
    """Run `octavo` in a process of its own."""
    done = subprocess.run(
        [*OCTAVO, *arguments], input=stdin.encode(), capture_output=True, timeout=60, check=False
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> list[str]:
    """Flags that choose the tiny model."""
    return ["--model", str(tiny_path), *QUICK]


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    """The tiny model in this process: the oracle of what commands print."""
    with LLM(str(tiny_path), threads=1, max_model_len=256) as llm:
        yield llm


def complete(llm: LLM, prompt: str, **params: object) -> str:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), progress=False)[0].text


# -- help and settings ------------------------------------------------------------------------------


def test_help_comes_at_once() -> None:
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = octavo_process("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # The processor's time, since others may share the cores; it does nothing but compute.
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.code == 0
    assert all(word in result.out for word in ("serve", "chat", "generate", "pull", "convert"))
    assert statistics.median(seconds) < HELP_SECONDS


@pytest.mark.parametrize(
    "code",
    ["import octavo", "import octavo.cli", "from octavo.cli import serve, chat, generate, pull, convert"],
)
def test_imports_that_need_no_torch(code: str) -> None:
    check = f"{code}; import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_every_setting_is_a_flag(command: str) -> None:
    result = octavo(command, "--help")
    assert result.code == 0
    for field in dataclasses.fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in result.out
        assert field.metadata["help"].split()[0] in result.out


def test_version() -> None:
    import octavo as package

    assert octavo("--version").out.strip() == package.__version__


def test_explain_config_says_where_each_value_came_from() -> None:
    long_path = "/somewhere/" + "deep/" * 30
    result = octavo(
        "serve", "--explain-config", "--max-num-seqs", "3", "--allowed-hosts", "a", "--allowed-hosts", "b,c",
        OCTAVO_THREADS="2", OCTAVO_CACHE_DIR=long_path, OCTAVO_API_KEY="sk-one,sk-two",
    )  # fmt: skip
    assert (result.code, result.err) == (0, "")
    rows = [line.split() for line in result.out.splitlines()]
    fields = dataclasses.fields(ServerConfig) + dataclasses.fields(EngineConfig)
    assert [row[0] for row in rows[1:]] == [field.name for field in fields]
    assert ["allowed_hosts", "a,", "b,", "c", "given"] in rows
    assert ["api_key", "(2", "given,", "not", "shown)", "OCTAVO_API_KEY"] in rows
    assert "sk-" not in result.out
    assert ["max_num_seqs", "3", "given"] in rows
    assert ["threads", "2", "OCTAVO_THREADS"] in rows
    assert ["cache_dir", long_path, "OCTAVO_CACHE_DIR"] in rows
    assert ["policy", "fcfs", "default"] in rows


# -- mistakes ---------------------------------------------------------------------------------------

MISTAKES: list[tuple[list[str], str]] = [
    (["generate", "hi", "--model", "smollm3"], "The catalog has: smollm2-135m-instruct"),
    (["generate", "hi", "--model", "/nowhere/x.gguf"], "no file '/nowhere/x.gguf'"),
    (["generate", "hi", "--model", "[red]x[/blue].gguf"], "no file '[red]x[/blue].gguf'"),
    (["generate", "hi", "--temperature", "-1"], "temperature is -1"),
    (["generate", "hi", "--temperature", "warm"], "--temperature"),
    (["generate", "hi", "--stop", ""], "stop[0] has 0 characters"),
    (["generate", "hi", "--top-p", "2"], "top_p is 2"),
    (["generate", "hi", "--backend", "abacus"], "backend is 'abacus'; it must be one of auto, native, torch"),
    (["generate", "hi", "--max-num-seqs", "0"], "max_num_seqs is 0"),
    (["generate", "--file", "/nowhere/prompts.txt"], "can't read prompts from /nowhere/prompts.txt"),
    (["generate"], "nothing to complete"),
    (["generate", ""], "nothing to complete"),
    (["chat", "--max-tokens", "-1"], "max_tokens is -1"),
    (["serve", "--port", "99999"], "--port is 99999; ports are 0..65535"),
    (["serve", "--port", "-1"], "--port is -1"),
    (["serve", "--port", "http"], "--port"),
    (["serve", "--host", "nowhere.invalid"], "Choose another --host"),
    (["serve", "--host", "x" * 300], "Choose another --host"),
    (["serve", "--model", "smollm3", "--port", "0"], "The catalog has"),
    (["serve", "more"], "more"),
    (["sevre"], "sevre"),
    (["serve", "--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=[" ".join(a)[:50] for a, _ in MISTAKES])
def test_a_mistake_is_one_sentence(arguments: list[str], says: str) -> None:
    result = octavo(*arguments)
    assert result.code in (1, 2)
    assert says in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    if result.err.startswith("error:"):
        assert result.err.count("\n") == 1  # not broken at 80 columns


def test_a_bad_environment_variable_is_named() -> None:
    result = octavo("generate", "hi", OCTAVO_THREADS="many")
    assert (result.code, result.err) == (1, "error: OCTAVO_THREADS is 'many', which is no int\n")


def test_a_taken_port_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = octavo("serve", "--port", str(port))
    assert result.code == 1
    assert f"can't listen on 127.0.0.1:{port}" in result.err
    assert result.err.endswith("Choose another --port\n")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + bytes(range(200)))
    result = octavo("generate", "hi", "--model", str(path))
    assert result.code == 1
    assert "noise.gguf" in result.err
    assert "Traceback" not in result.err


def test_standard_input_that_is_no_text(model: list[str]) -> None:
    for command in ("generate", "chat"):
        result = octavo(command, *model, stdin=b"\xff\xfe\n")
        assert result.code == 1
        assert "error: standard input is no UTF-8 text" in result.err
        assert "Traceback" not in result.err


# -- generate ---------------------------------------------------------------------------------------


def test_one_prompt(model: list[str], llm: LLM) -> None:
    result = octavo("generate", "the cat", "--max-tokens", "20", *model)
    assert result.code == 0, result.err
    assert result.out == complete(llm, "the cat", max_tokens=20) + "\n"
    assert "tiny-llama" in result.err


def test_stop_strings(model: list[str], llm: LLM) -> None:
    text = complete(llm, "the cat", max_tokens=20, temperature=1, seed=7)
    stop = text[5:7]
    flags = ["--max-tokens", "20", "--temperature", "1", "--seed", "7", "--stop", "not there", "--stop", stop]
    assert octavo("generate", "the cat", *flags, *model).out == text[: text.find(stop)] + "\n"


def test_standard_input_is_one_prompt(model: list[str], llm: LLM) -> None:
    flags = ["--max-tokens", "20", "--temperature", "1", "--seed", "7"]
    result = octavo_process("generate", *flags, *model, stdin="two\nlines")
    assert result.out == complete(llm, "two\nlines", max_tokens=20, temperature=1, seed=7) + "\n"


def test_several_prompts_and_a_file_as_json(model: list[str], llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("from a file\n\nand [/another] :smile:\n")
    result = octavo("generate", "first", "--file", str(file), "--json", "--max-tokens", "5", *model)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]  # nothing else is printed
    prompts = ["first", "from a file", "and [/another] :smile:"]
    assert [row["prompt"] for row in rows] == prompts
    assert [row["text"] for row in rows] == [complete(llm, prompt, max_tokens=5) for prompt in prompts]
    assert all(1 <= len(row["token_ids"]) <= 5 for row in rows)


def test_several_prompts_as_text(model: list[str], llm: LLM) -> None:
    prompts = ["a [/b] c", "[red]d", ":smile:"]
    result = octavo("generate", *prompts, "--max-tokens", "5", *model)
    assert result.code == 0, result.err
    assert result.out == "".join(complete(llm, prompt, max_tokens=5) + "\n" for prompt in prompts)
    for prompt in prompts:
        assert f"── {prompt}\n" in result.err


def test_a_prompt_beyond_the_context(model: list[str]) -> None:
    result = octavo("generate", "x" * 300, *model)
    assert (result.code, result.out) == (1, "")
    assert "error: the prompt has 300 tokens; the context holds 256" in result.err


def test_a_reader_who_leaves(model: list[str]) -> None:
    with subprocess.Popen(
        [*OCTAVO, "generate", "the cat", *model], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(30) == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


# -- chat -------------------------------------------------------------------------------------------


def test_a_conversation_through_a_pipe(model: list[str], llm: LLM) -> None:
    turns = "the cat\n\nthe dog\n/clear\nthe cat\n/exit\nnever\n"
    result = octavo("chat", "--system", "be brief", "--max-tokens", "8", *model, stdin=turns)
    assert result.code == 0, result.err
    params = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
    (first,) = llm.chat(messages, params, progress=False)
    more = [{"role": "assistant", "content": first.text}, {"role": "user", "content": "the dog"}]
    (second,) = llm.chat(messages + more, params, progress=False)
    assert result.out == f"{first.text}\n{second.text}\n{first.text}\n"
    assert "(0 cached)" in result.err
    assert "Type a message" in result.err


def test_a_turn_that_is_refused_is_taken_back(model: list[str], llm: LLM) -> None:
    result = octavo("chat", "--max-tokens", "8", *model, stdin=f"{'x' * 300}\nthe cat\n")
    assert result.code == 0, result.err
    assert "the context holds 256" in result.err
    messages = [{"role": "user", "content": "the cat"}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), progress=False)
    assert result.out == f"{answer.text}\n"


def test_ctrl_c_stops_an_answer_but_not_the_chat(tmp_path: Path) -> None:
    """At a terminal: two long answers are interrupted, Ctrl-D leaves."""
    # Of so many tokens EOS is seldom drawn, so answers are long; those beyond the 262 have no text.
    path = make_llama_gguf(tmp_path, vocab_size=20_000, max_position_embeddings=65536).path
    flags = ["--model", str(path), "--threads", "1", "--temperature", "1", "--seed", "1"]
    with at_terminal([*OCTAVO, "chat", *flags]) as terminal:
        for _ in range(2):
            terminal.wait_for(b"> ")
            terminal.type(b"tell a story\n")
            terminal.wait_for(b"story\r\n")  # the echo
            terminal.wait_for_anything()  # the answer has begun
            terminal.type(CTRL_C)
            terminal.wait_for(b"tokens at")
        terminal.wait_for(b"> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(30) == 0
