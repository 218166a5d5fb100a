"""`octavo convert`: what it writes is served as the model that it was made from."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.config.resolve import resolve
from octavo.input.tokenizer import Tokenizer
from octavo.runner.model_runner import ModelRunner
from octavo.weights.checkpoint import open_checkpoint
from tiny_models import make_llama_gguf

IDS = [[5, 80, 3, 200, 7, 7, 31]]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def logits(path: Path) -> np.ndarray:
    runner = ModelRunner(path, resolve({"kv_dtype": "f32"}).config)
    values: np.ndarray = runner.predict(IDS)
    return values


@pytest.mark.parametrize("stored", ["F32", "Q8_0", "Q4_1"])
def test_a_gguf_file_becomes_a_directory_that_answers_alike(tmp_path: Path, stored: str) -> None:
    tiny = make_llama_gguf(tmp_path, quantization=stored, num_key_value_heads=2, max_position_embeddings=128)
    out = tmp_path / "out"
    code, printed, said = run(str(tiny.path), str(out))
    assert (code, printed) == (0, f"{out}\n"), said
    assert "of which 0 quantised" in said
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == ("float32" if stored == "F32" else "float16")
    # The others' weights are rounded to f16.
    np.testing.assert_allclose(logits(out), tiny.logits(IDS), atol=1e-3 if stored == "F32" else 0.05)
    params = SamplingParams(temperature=0, max_tokens=12)
    answers = []
    for path in (tiny.path, out):
        with LLM(str(path), threads=1, backend="torch") as llm:
            chat = llm.chat([{"role": "user", "content": "the cat"}], params, progress=False)
            answers.append((llm.generate("the cat", params, progress=False)[0].text, chat[0].text))
    if stored == "F32":
        assert answers[0] == answers[1]
    ours, theirs = Tokenizer.from_directory(out), Tokenizer.from_gguf(open_checkpoint(tiny.path).metadata)
    assert (ours.eos_ids, ours.chat_templates) == (theirs.eos_ids, theirs.chat_templates)


def test_transformers_reads_it(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny = make_llama_gguf(tmp_path, max_position_embeddings=128)
    out = tmp_path / "out"
    assert run(str(tiny.path), str(out))[0] == 0
    model = AutoModelForCausalLM.from_pretrained(out).double()
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(IDS)).logits.numpy(), tiny.logits(IDS), atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("the cat<|im_end|>").input_ids == Tokenizer.from_directory(out).encode(
        "the cat<|im_end|>"
    )
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )


def test_quantising_says_how_much_was_lost(tmp_path: Path) -> None:
    tiny = make_llama_gguf(tmp_path, max_position_embeddings=128)
    code, printed, said = run(str(tiny.path), str(tmp_path / "out"), "--quantization", "int8")
    assert (code, printed) == (0, f"{tmp_path / 'out'}\n"), said
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "of which 14 quantised" in lines["tensors"]
    assert "proj.weight)" in lines["worst"]
    assert "0." in lines["mean"]
    assert "MB" in lines["before"]
    assert "files: 1" in lines["after"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere", "{out}"], "no file '/nowhere'"),
        (["{gguf}", "{gguf}"], "is there already, and nothing is replaced"),
        (["{gguf}", "{out}", "--quantization", "int5"], "it must be one of none, int4, int8"),
        (["o/never-fetched", "{out}", "--dtype", "int8"], "it must be one of auto, float16"),
        (["{gguf}"], "OUT"),
    ],
)
def test_mistakes(arguments: list[str], says: str, tmp_path: Path) -> None:
    gguf = make_llama_gguf(tmp_path, max_position_embeddings=128).path
    code, printed, said = run(*(a.format(out=tmp_path / "out", gguf=gguf) for a in arguments))
    assert code in (1, 2)
    assert printed == ""
    assert says in said
    assert not (tmp_path / "out").exists()
