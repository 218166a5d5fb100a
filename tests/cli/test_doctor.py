"""`octavo doctor`: what it says of models that are served, served otherwise, too large, or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import octavo

from families import make_model
from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.engine.doctor import examine
from octavo.kv_cache.sizing import blocks_of_sequence, longest_sequence
from octavo.platforms import cpu, versions
from octavo.runner.model_runner import ModelRunner
from tiny_models import make_llama_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_llama_gguf(
        tmp_path, quantization="Q6_K", hidden_size=256, intermediate_size=256, head_dim=64
    ).path


def test_what_it_says_of_a_model(tiny: Path) -> None:
    said = octavo("doctor", str(tiny), "--kv-cache-gib", "0.01", "--max-model-len", "256", COLUMNS="100")
    assert said.code == 0
    for line in (
        "GGUF file", "llama", "2 layers, hidden 256, 4 heads, 2 of KV", "262, 262 of them with text",
        "512 tokens", "<|im_end|>", "note: tiny-llama-q6_k.gguf: tensors held in a format near their own",
        "KV cache, ", "in all", "256",
    ):  # fmt: skip
        assert line in said.out, line
    assert str(tiny) in said.out.replace("\n", "").replace(" ", "")
    assert said.err == ""


def test_the_bill_is_what_an_engine_holds(tiny: Path) -> None:
    config = resolve({"model": str(tiny), "max_model_len": 128, "kv_cache_gib": 0.01}).config
    found, engine = examine(config), build_engine(config)
    assert found.bill == engine.info.bill
    blocks = engine.info.bill.num_blocks
    assert [row.length for row in found.contexts] == [128]
    assert found.contexts[0].at_once == blocks // 8
    assert found.longest == 128
    engine.core.close()


def test_the_longest_sequence_is_the_longest(tmp_path: Path) -> None:
    make_model("gemma2").save_pretrained(tmp_path)
    runner = ModelRunner(tmp_path, resolve({"backend": "torch", "max_num_batched_tokens": 16}).config)
    for blocks in range(60):
        length = longest_sequence(runner.sealed, blocks)
        assert blocks_of_sequence(runner.sealed, length) <= blocks
        if length < runner.max_model_len:
            assert blocks_of_sequence(runner.sealed, length + 1) > blocks


def test_backends_that_decline_say_why(tmp_path: Path) -> None:
    if not library.available():
        pytest.skip("the native library is not built")
    make_model("llama", head_dim=12).save_pretrained(tmp_path)
    assert octavo("doctor", str(tmp_path)).code == 1, "it has no tokenizer"
    runner = ModelRunner(tmp_path, resolve({}).config)
    assert "heads of 12 elements are not a multiple of 8" in runner.declined["native"]
    runner.close()


def test_too_little_memory_is_said_with_what_would_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available_memory", lambda: 200 << 20)
    said = octavo("doctor", str(tiny))
    assert said.code == 1
    assert "The longest sequence that free memory holds beside the model: 512 tokens" in said.out
    assert "error: the engine needs" in said.err
    assert "Lower --kv-cache-gib" in said.err


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_damaged_file_is_an_error_after_the_versions(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    said = octavo("doctor", str(tmp_path / "bad.gguf"))
    assert said.code == 1
    assert "Versions" in said.out
    assert said.err.startswith("error: ")
    assert "bad.gguf" in said.err


def test_a_family_that_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    said = octavo("doctor", str(tmp_path))
    assert said.code == 1
    assert "architecture 'mamba' is not served; served so far: " in said.err


def test_versions_that_clash_are_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.14.0", "numpy": "1.26.4", "gguf": ""}
    original = versions._installed
    monkeypatch.setattr(versions, "_installed", lambda name: installed.get(name, original(name)))
    found = {row.name: row for row in versions.check_versions()}
    assert found["torch"].verdict is versions.Verdict.CLASH
    assert found["torch"].advice == "pip install 'torch<2.14,>=2.11'"
    assert found["numpy"].verdict is versions.Verdict.UNTESTED
    assert (found["gguf"].installed, found["gguf"].verdict) == ("missing", versions.Verdict.CLASH)
    assert found["python"].verdict is not versions.Verdict.CLASH
    said = octavo("doctor")
    assert said.code == 1
    assert "versions clash: torch 2.14.0: pip install 'torch<2.14,>=2.11'; gguf missing:" in said.err
    assert "Model" not in said.out


def test_this_installation_has_no_clash() -> None:
    found = versions.check_versions()
    assert {row.name for row in found} >= {"python", "torch", "numpy", "tokenizers", "gguf"}
    assert not [row for row in found if row.verdict is versions.Verdict.CLASH]
