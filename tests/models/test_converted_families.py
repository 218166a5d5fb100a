"""GGUF files of every family through `octavo convert`: transformers and we read what is written.

Oracle and tolerance are those of test_families.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_families import make_runner, oracle
from test_gguf_families import CONVERTED, random_ids, written

from octavo.errors import UnsupportedModelError
from octavo.models.registry import model_builder
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import DType
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.convert import convert
from octavo.weights.convert_gguf import open_gguf
from octavo.weights.convert_sources import Source


def source_of(path: Path) -> Source:
    """The file as the command opens it, without its tokenizer."""
    checkpoint = open_checkpoint(path)
    builder = ProgramBuilder(checkpoint.architecture, format_of=checkpoint.format_of, kv_dtype=DType.F16)
    program = model_builder(checkpoint.architecture)(builder, checkpoint.config, 64)
    names = [part for weight in program.weights for part in weight.parts]
    return open_gguf(checkpoint, names, {}, bos_id=None, eos_ids=())


#: What `octavo convert` writes; stacked experts of gpt-oss are not taken apart in the other direction.
WRITTEN = [family for family in CONVERTED if family != "gpt-oss"]


@pytest.mark.parametrize("family", WRITTEN)
def test_logits_stay(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, model = written(tmp_path, family)
    out = tmp_path / "out"
    convert(source_of(path), out)
    ids = random_ids(9)
    exact, error = oracle(model, ids)
    tolerance = 32 * max(error, 1e-7 * np.abs(exact).max())
    read = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        assert np.abs(read(torch.tensor(ids)).logits.numpy() - exact).max() <= tolerance
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": 128, "max_model_len": 64}
    assert np.abs(make_runner(out, **limits).predict(ids) - exact).max() <= tolerance


def test_gpt_oss_is_refused_with_what_is_converted(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "gpt-oss")
    with pytest.raises(UnsupportedModelError, match="'gpt_oss' models are not converted from GGUF; those of"):
        convert(source_of(path), tmp_path / "out")


@pytest.mark.parametrize("family", WRITTEN)
def test_int8_is_near(family: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, family)
    out = tmp_path / "out"
    report = convert(source_of(path), out, quantization="int8")
    assert report.errors
    ids = random_ids(9)
    exact, _ = oracle(model, ids)
    limits = {"max_num_batched_tokens": 128, "max_num_seqs": 128, "max_model_len": 64}
    found = make_runner(out, **limits).predict(ids)
    # Experts whose share is close to another's may change places.
    assert 0 < np.linalg.norm(found - exact) < 0.08 * np.linalg.norm(exact)
