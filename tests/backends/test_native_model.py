"""Whole programs on the native backend: a row's logits depend on nothing but its own sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import NATIVE_VARIANTS, F32Array, Heads, Rig, Seq, assert_same_bits, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.errors import BackendError
from octavo.program.ir import DType
from octavo.program.planner import Limits
from octavo.quantization.formats import Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

MakeRig = Callable[..., Rig]
VOCAB = 96
NUM_BLOCKS = 200
LIMITS = Limits(max_tokens=80, max_seqs=6, max_sampled=80, max_model_len=160)
LAYERS = (Heads(6, 2, 16), Heads(6, 2, 16, window=24), Heads(6, 2, 16, window=24))
MATRICES = [f"{i}.{name}" for i in range(len(LAYERS)) for name in ("qkv", "o", "gate_up", "down")]
#: Formats of weights, type of the KV cache, bits of activations.
MIXES = {
    "f32": (dict.fromkeys(MATRICES, Format.F32), DType.F32, 16),
    "q4m, q8 head": ({**dict.fromkeys(MATRICES, Format.Q4M), "embed": Format.Q8}, DType.F16, 16),
    "q4m on int8": ({**dict.fromkeys(MATRICES, Format.Q4M), "embed": Format.Q8}, DType.F16, 8),
    "q8, q4m head": ({**dict.fromkeys(MATRICES, Format.Q8), "embed": Format.Q4M}, DType.F16, 16),
    "q4, q8g16 head": ({**dict.fromkeys(MATRICES, Format.Q4), "embed": Format.Q8G16}, DType.F16, 16),
    "q4 on int8": ({**dict.fromkeys(MATRICES, Format.Q4), "embed": Format.Q8}, DType.F16, 8),
    "bf16": (dict.fromkeys([*MATRICES, "embed"], Format.BF16), DType.F16, 16),
    "f16": (dict.fromkeys([*MATRICES, "embed"], Format.F16), DType.F32, 16),
}


def model(
    make_rig: MakeRig, mix: str = "q4m, q8 head", threads: int = 2, isa: str = "auto", **options: Any
) -> Rig:
    """Three layers in three KV groups, tied head."""
    formats, kv_dtype, activation_bits = MIXES[mix]
    return make_rig(
        NativeBackend(threads, isa),
        tiny_model(vocab=VOCAB, layers=LAYERS, max_positions=LIMITS.max_model_len),
        formats=formats,
        kv_dtype=kv_dtype,
        activation_bits=activation_bits,
        limits=LIMITS,
        num_blocks=NUM_BLOCKS,
        **options,
    )


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


def alone(rig: Rig, token_ids: list[int]) -> F32Array:
    """Logits of every position, the sequence alone, in steps as long as they get."""
    seq = Seq(token_ids)
    outs = []
    while seq.num_computed < len(token_ids):
        outs += rig.step([(seq, min(LIMITS.max_tokens, len(token_ids) - seq.num_computed))])
    rig.release(seq)
    return np.concatenate(outs)


@pytest.mark.parametrize("mix", MIXES)
def test_builds_threads_and_chunks_agree(make_rig: MakeRig, mix: str) -> None:
    ids = tokens(130)
    expected = alone(model(make_rig, mix), ids)
    assert np.isfinite(expected).all()
    for isa, threads in [*NATIVE_VARIANTS, ("auto", 3)]:
        assert_same_bits(alone(model(make_rig, mix, threads, isa), ids), expected, f"{isa}, {threads}")
    rig = model(make_rig, mix, seed=0)
    for chunk in (1, 16, 23):
        seq = Seq(ids)
        outs = []
        while seq.num_computed < len(ids):
            outs += rig.step([(seq, min(chunk, len(ids) - seq.num_computed))])
        rig.release(seq)
        assert_same_bits(np.concatenate(outs), expected, f"chunks of {chunk}")


def test_any_workload_gives_each_sequence_its_own_bits(make_rig: MakeRig) -> None:
    """Sequences come and go in batches of any shape; each position's logits are those it has alone."""
    solo = model(make_rig)
    rigs = [model(make_rig, threads=threads, seed=0) for threads in (1, 2, 3)]
    known: dict[int, F32Array] = {}

    def expected(seed: int) -> F32Array:
        if seed not in known:
            known[seed] = alone(solo, tokens(LIMITS.max_model_len, seed))
        return known[seed]

    steps = st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=6), max_size=8
    )

    @settings(max_examples=150)
    @given(
        rig=st.sampled_from(rigs),
        seeds=st.permutations(range(6)),
        steps=steps,
        sample=st.sampled_from(["all", "last"]),
    )
    def check(rig: Rig, seeds: list[int], steps: list[list[tuple[int, int]]], sample: Any) -> None:
        seqs = [Seq(tokens(LIMITS.max_model_len, seed)) for seed in seeds]
        try:
            for step in steps:
                batch, room = [], LIMITS.max_tokens
                for index, wanted in dict(step).items():
                    seq = seqs[index]
                    n = min(wanted, room, LIMITS.max_model_len - seq.num_computed)
                    if n:
                        batch.append((seq, n))
                        room -= n
                results = rig.step(batch, sample)
                for (seq, n), logits in zip(batch, results, strict=True):
                    rows = expected(seeds[next(i for i, s in enumerate(seqs) if s is seq)])
                    first = seq.num_computed - (n if sample == "all" else 1)
                    assert_same_bits(logits, rows[first : seq.num_computed])
        finally:
            for seq in seqs:
                rig.release(seq)

    check()


def test_a_run_allocates_no_memory_of_its_own(make_rig: MakeRig) -> None:
    """Whatever a step writes lies in the arena and the sequence's pages."""
    rig = model(make_rig)
    weights = rig.memory.weights.clone()
    seq = Seq(tokens(60))
    rig.step([(seq, 60)])
    assert bool((rig.memory.weights == weights).all())
    pages = rig.memory.kv.numpy()
    for storage in range(rig.program.num_storages):
        groups = [g for g, group in enumerate(rig.program.kv_groups) if storage < len(group.layers)]
        used = {block for g in groups for block in seq.blocks[g]}
        unused = np.setdiff1d(np.arange(pages.shape[1]), sorted(used))
        assert (pages[storage, unused] == 0xFF).all()


# -- what is refused ----------------------------------------------------------------------------


def set_token(rig: Rig, value: int) -> None:
    rig.inputs.token_ids[7] = value


def set_position(rig: Rig, value: int) -> None:
    rig.inputs.positions[7] = value


def set_rope_row(rig: Rig, value: int) -> None:
    rig.inputs.rope_rows[7] = value


def set_slot(rig: Rig, value: int) -> None:
    rig.inputs.slot_mapping[1, 4] = value


def set_block(rig: Rig, value: int) -> None:
    rig.inputs.block_table[0, 0, 0] = value


def set_window_block(rig: Rig, value: int) -> None:
    rig.inputs.block_table[1, 1, 1] = value


def set_seq_len(rig: Rig, value: int) -> None:
    rig.inputs.seq_lens[1] = value


def set_cu_q(rig: Rig, value: int) -> None:
    rig.inputs.cu_q[1] = value


def set_cu_q_end(rig: Rig, value: int) -> None:
    rig.inputs.cu_q[2] = value


def set_sampled(rig: Rig, value: int) -> None:
    rig.inputs.sampled_rows[3] = value


@pytest.mark.parametrize(
    ("spoil", "value", "message"),
    [
        (set_token, VOCAB, r"op 0 \(embedding\), row 7, token id 96 is not in \[0, 96\)"),
        (set_token, -1, r"op 0 \(embedding\), row 7, token id -1 is not"),
        (set_position, 3, "row 7, position 3 should be 7: the 20 new tokens of sequence 0 end at seq_len 20"),
        (set_rope_row, 160, r"op \d+ \(rotary_store_kv\), row 7, rope row 160 is not in \[0, 160\)"),
        (set_rope_row, -1, r"op \d+ \(rotary_store_kv\), row 7, rope row -1 is not"),
        (set_slot, 3200, r"op \d+ \(rotary_store_kv\), row 4, KV slot 3200 is not in \[0, 3200\)"),
        (set_slot, -1, r"op \d+ \(rotary_store_kv\), row 4, KV slot -1 is not"),
        (set_block, 200, r"op 4 \(attention\), row 0, KV block 200 is not in \[0, 200\)"),
        (set_block, -1, r"op 4 \(attention\), row 0, KV block -1 is not"),
        (set_window_block, 200, r"op \d+ \(attention\), row 1, KV block 200 is not in \[0, 200\)"),
        (
            set_seq_len,
            51,
            "row 20, position 40 should be 41: the 10 new tokens of sequence 1 end at seq_len 51",
        ),
        (set_seq_len, 161, r"row 1, seq_len 161 is not in \[10, 160\]"),
        (set_seq_len, 9, r"row 1, seq_len 9 is not in \[10, 160\]"),
        (set_cu_q, 31, "row 0, cu_q goes from 0 to 31, but must not fall nor exceed the step's 30 tokens"),
        (set_cu_q, -2, "row 0, cu_q goes from 0 to -2"),
        (set_cu_q_end, 29, r"cu_q goes from 0 to 29, but the step's tokens are \[0, 30\)"),
        (set_sampled, 30, r"op \d+ \(gather_rows\), row 3, sampled row 30 is not in \[0, 30\)"),
        (set_sampled, -1, r"op \d+ \(gather_rows\), row 3, sampled row -1 is not"),
    ],
)
def test_inputs_out_of_range_are_refused_and_nothing_is_written(
    make_rig: MakeRig, spoil: Callable[[Rig, int], None], value: int, message: str
) -> None:
    rig = model(make_rig)
    first, second = Seq(tokens(20)), Seq(tokens(50, seed=1))
    rig.step([(second, 40)])
    counts = rig.fill([(first, 20), (second, 10)], "all")
    arena, kv = rig.memory.arena.clone(), rig.memory.kv.clone()
    spoil(rig, value)
    with pytest.raises(BackendError, match=message):
        rig.backend.run(*counts)
    assert bool((rig.memory.arena == arena).all())
    assert bool((rig.memory.kv == kv).all())
    outs = rig.step([(first, 20), (second, 10)])  # the next step, as if nothing had been
    assert_same_bits(outs[0], alone(rig, first.token_ids))


def test_blocks_that_slid_out_of_a_window_are_not_asked_for(make_rig: MakeRig) -> None:
    rig = model(make_rig)
    seq = Seq(tokens(101))
    expected = alone(rig, seq.token_ids)
    for n in (80, 20):
        rig.step([(seq, n)])
    for group in (1, 2):
        gone = (100 - 24 + 1) // 16
        seq.blocks[group][:gone] = [-7] * gone
    assert_same_bits(rig.step([(seq, 1)])[0], expected[100:])


def test_steps_larger_than_the_limits_are_refused(make_rig: MakeRig) -> None:
    rig = model(make_rig)
    for counts, message in [
        ((81, 1, 1), "the step has 81 tokens, but 0 to 80 fit"),
        ((1, 7, 1), "the step has 7 sequences, but 0 to 6 fit"),
        ((1, 1, 81), "the step has 81 sampled rows, but 0 to 80 fit"),
        ((-1, 1, 1), "the step has -1 tokens"),
    ]:
        with pytest.raises(BackendError, match=message):
            rig.backend.run(*counts)


def test_an_empty_step_is_a_step(make_rig: MakeRig) -> None:
    rig = model(make_rig)
    assert rig.backend.run(0, 0, 0).shape == (0, VOCAB)
    seq = Seq(tokens(9))
    expected = alone(rig, seq.token_ids)
    assert_same_bits(rig.step([(seq, 9)])[0], expected)


def test_a_caller_that_flushes_subnormals_changes_nothing(make_rig: MakeRig) -> None:
    """The caller is a thread of the team; its floating-point mode must not show in the bits."""
    import torch

    rig = model(make_rig, mix="f32", threads=1)
    weight = next(w for w in rig.program.weights if w.name == "norm")
    begin = rig.sealed.weight_offsets[weight.id]
    rig.memory.weights[begin : begin + 4 * weight.shape[0]].view(torch.float32).mul_(1e-39)
    ids = tokens(40)
    expected = alone(rig, ids)
    assert (expected[expected != 0].__abs__() < 1.2e-38).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        assert_same_bits(alone(rig, ids), expected)
    finally:
        torch.set_flush_denormal(False)
