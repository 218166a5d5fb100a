"""Every family and rope type against transformers: a tiny random model, whole, chunked and batched.

The oracle runs in float64. The tolerance is 32 times transformers' own float32 error on the same input: the
same operations in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import FAMILIES, VOCAB, make_model
from octavo import ModelRunner
from octavo.backends.torch.backend import TorchBackend
from octavo.config.resolve import resolve
from octavo.errors import ProgramError

Save = Callable[[Any], Path]


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a model as transformers does, and says where."""

    def write(model: Any) -> Path:
        model.save_pretrained(tmp_path)
        return tmp_path

    return write


def make_runner(path: Path, **settings: Any) -> ModelRunner:
    return ModelRunner(path, resolve(settings).config, backend=TorchBackend(num_threads=1))


def oracle(model: Any, ids: list[list[int]]) -> tuple[np.ndarray, float]:
    """float64 logits, and float32's error."""
    with torch.inference_mode():
        single = model(torch.tensor(ids)).logits.numpy()
        exact = model.double()(torch.tensor(ids)).logits.numpy()
        torch.nn.Module.float(model)
    return exact, float(np.abs(single - exact).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, save: Save) -> None:
    model = make_model(family)
    path = save(model)
    rng = np.random.default_rng(0)
    # around a window of 8, and five of it; around the original context of 32 of longrope
    for length in (7, 8, 9, 20, 32, 33, 40, 100):
        ids = rng.integers(0, VOCAB, (2, length)).tolist()
        exact, error = oracle(model, ids)
        whole = make_runner(path, max_num_batched_tokens=256, max_num_seqs=256, max_model_len=128)
        logits = whole.predict(ids)
        assert np.abs(logits - exact).max() <= 32 * max(error, 1e-7 * np.abs(exact).max())
        chunked = make_runner(path, max_num_batched_tokens=5, max_num_seqs=5, max_model_len=128)
        assert np.array_equal(chunked.predict(ids), logits)


def test_what_native_does_not_serve_falls_back_to_torch(save: Save, caplog: pytest.LogCaptureFixture) -> None:
    path = save(make_model("llama", head_dim=12))
    assert ModelRunner(path, resolve({}).config).backend.name == "torch"
    said = [record.getMessage() for record in caplog.records]
    reason = "heads of 12 elements are not a multiple of 8"
    assert any(reason in line and "torch backend serves it" in line for line in said)
    with pytest.raises(ProgramError, match=reason):
        ModelRunner(path, resolve({"backend": "native"}).config)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_serves(family: str, save: Save) -> None:
    model = make_model(family)
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 40)).tolist()
    exact, error = oracle(model, ids)
    settings = {"backend": "native", "kv_dtype": "f32", "max_num_seqs": 64}
    runner = ModelRunner(save(model), resolve(settings).config)
    assert np.abs(runner.predict(ids) - exact).max() <= 32 * error
