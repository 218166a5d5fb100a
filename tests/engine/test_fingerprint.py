"""The fingerprint follows the bits: the weights and what computes with them, not where they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.engine.fingerprint import fingerprint

NBYTES = 3 << 20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * (NBYTES // 256))
    return path


def test_it_is_stable_and_looks_like_openais(weights: Path, tmp_path: Path) -> None:
    first = fingerprint(weights, backend="native", kv_dtype="f16")
    assert first == fingerprint(weights, kv_dtype="f16", backend="native")
    assert first.startswith("fp_")
    assert len(first) == 13
    copy = tmp_path / "another name.gguf"
    shutil.copy(weights, copy)
    assert fingerprint(copy, backend="native", kv_dtype="f16") == first


@pytest.mark.parametrize("changed", [{"backend": "torch"}, {"kv_dtype": "f32"}, {"deterministic": False}])
def test_settings_that_change_bits_change_it(weights: Path, changed: dict[str, object]) -> None:
    settings = {"backend": "native", "kv_dtype": "f16", "deterministic": True}
    assert fingerprint(weights, **settings) != fingerprint(weights, **(settings | changed))


@pytest.mark.parametrize("where", [0, 1 << 19, (1 << 20) + 100, NBYTES // 2 + 4096 * 4, NBYTES])
def test_other_weights_have_another(weights: Path, where: int) -> None:
    """A fine-tune has the same size and head; where == NBYTES makes the file longer."""
    before = fingerprint(weights)
    with weights.open("r+b") as stream:
        stream.seek(where)
        stream.write(b"\xff" * (64 << 10))
    assert fingerprint(weights) != before


def test_a_directory_is_told_by_its_weights_config_and_tokenizer(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text(name)
    seen = [fingerprint(tmp_path)]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).write_text(f"another {name}")
        seen.append(fingerprint(tmp_path))
    assert len(set(seen)) == 4
    (tmp_path / "README.md").write_text("changed")
    assert fingerprint(tmp_path) == seen[-1]
