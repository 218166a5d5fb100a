"""Reads model directories written here. Oracle: the `tokenizers` library."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.input import hf_tokenizer
from octavo.input.tokenizer import Tokenizer
from octavo.output.detokenizer import Detokenizer

CORPUS = ["the cat sat on the mat", "a hat  on a cat", "naïve cafés, 123 words", "你好 世界"] * 20


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def metaspace(scheme: str = "always") -> RustTokenizer:
    tokenizer = RustTokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> RustTokenizer:
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    for piece in ["▁", "a", "b", "▁a", "ab", "▁▁", "é"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    tokenizer = RustTokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "metaspace, no prefix": lambda: metaspace("never"),
    "sentencepiece": sentencepiece_like,
}


def write(directory: Path, tokenizer: RustTokenizer | None = None, **files: Any) -> Path:
    """Files of a model; keys are names with `__` for the dot."""
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return directory


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_and_ids_are_the_librarys(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if not path.exists():
        write(tmp_path, KINDS[kind]())
    theirs, ours = RustTokenizer.from_file(str(path)), Tokenizer.from_directory(tmp_path)
    text = data.draw(st.text(st.sampled_from("the catsonb é123 你好🙂\n"), max_size=20))
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids)
    # Whole characters only: of half ones, the library and UTF-8's own rule make different numbers.
    drawn = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
    drawn = [i for i in drawn if not any(byte >= 0x80 for byte in ours.token_bytes(i))]
    for skip in (True, False):
        expected = theirs.decode(drawn, skip_special_tokens=skip)
        assert ours.decode(drawn, skip_special_tokens=skip) == expected
        detokenizer = Detokenizer(ours, skip_special_tokens=skip)
        deltas = [detokenizer.push([token_id]) for token_id in drawn]
        assert "".join([*deltas, detokenizer.finish()]) == expected


def test_truncation_padding_and_dropout_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level()
    text = "the cat sat on the mat"
    ids = tokenizer.encode(text).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.model.dropout = 0.9
    ours = Tokenizer.from_directory(write(tmp_path, tokenizer))
    assert [ours.encode(text) for _ in range(3)] == [ids] * 3


def test_the_least_number_of_tokens_is_never_more_than_there_are(tmp_path: Path) -> None:
    texts = [
        " " * 500,
        "the cat " * 50,
        "🙂" * 200,
        "<s>" * 50,
        "e\u0323\u0302" * 100,
        "\u03b1\u0313\u0300\u0345" * 99,
    ]
    for make in KINDS.values():
        tokenizer = make()
        variants = [tokenizer]
        if not tokenizer.normalizer:
            for normalizer in (normalizers.NFC(), normalizers.Replace(" ", "")):
                variants.append(RustTokenizer.from_str(tokenizer.to_str()))
                variants[-1].normalizer = normalizer
        variants.append(RustTokenizer.from_str(tokenizer.to_str()))
        variants[-1].add_tokens([AddedToken("the", lstrip=True)])
        for variant in variants:
            ours = Tokenizer.from_directory(write(tmp_path, variant))
            for text in (*texts, " " * 500 + "the"):
                assert ours.min_tokens(text) <= len(ours.encode(text))
    assert Tokenizer.from_directory(write(tmp_path, byte_level())).min_tokens("a" * 1000) > 50


def test_bos_is_what_the_tokenizer_or_its_config_says(tmp_path: Path) -> None:
    tokenizer = byte_level()
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    assert not Tokenizer.from_directory(write(tmp_path, tokenizer, tokenizer_config__json=config)).adds_bos
    config["add_bos_token"] = True
    ours = Tokenizer.from_directory(write(tmp_path, tokenizer_config__json=config))
    assert (ours.adds_bos, ours.bos_id, ours.encode("")) == (True, 0, [0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    ours = Tokenizer.from_directory(write(tmp_path, tokenizer, tokenizer_config__json={}))
    assert (ours.adds_bos, ours.bos_id, ours.encode("a")[0]) == (True, 0, 0)
    assert ours.encode("a")[-1] != 1
    ours = Tokenizer.from_directory(write(tmp_path, tokenizer_config__json={"add_bos_token": False}))
    assert not ours.adds_bos


def test_eos_ids_are_those_of_all_files(tmp_path: Path) -> None:
    write(tmp_path, byte_level(), tokenizer_config__json={"eos_token": "<|im_end|>"})
    assert Tokenizer.from_directory(tmp_path).eos_ids == (2,)
    write(tmp_path, generation_config__json={"eos_token_id": [1, 2, 99999]}, config__json={"eos_token_id": 0})
    assert Tokenizer.from_directory(tmp_path).eos_ids == (2, 1, 0)
    write(tmp_path, tokenizer_config__json={}, special_tokens_map__json={"eos_token": {"content": "</s>"}})
    assert Tokenizer.from_directory(tmp_path).eos_ids == (1, 2, 0)


def test_templates_come_from_a_file_of_their_own_or_from_the_config(tmp_path: Path) -> None:
    write(tmp_path, byte_level())
    assert Tokenizer.from_directory(tmp_path).chat_templates == {}
    write(tmp_path, chat_template__json={"chat_template": "from json"})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "from json"}
    write(tmp_path, tokenizer_config__json={"chat_template": "one"})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write(tmp_path, tokenizer_config__json={"chat_template": named})
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "a", "tool_use": "b"}
    write(tmp_path, chat_template__jinja="of its own")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "of its own", "rag": "r"}


def test_no_tokenizer_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no tokenizer\.model"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", "", "can't read it"),
        ("tokenizer.json", "{}", "can't read it"),
        ("tokenizer.json", "[" * 100_000, "can't read it"),
        ("tokenizer_config.json", "[1]", "holds a list"),
        ("tokenizer_config.json", "{", "no JSON"),
        ("tokenizer_config.json", "[" * 100_000, "no JSON"),
        ("tokenizer_config.json", '{"a": ' + "9" * 5000 + "}", "no JSON"),
        ("tokenizer_config.json", '{"bos_token": "<nowhere>"}', "bos_token is '<nowhere>'"),
        ("tokenizer_config.json", '{"eos_token": 7}', "eos_token is '7'"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is neither"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template is neither"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id has '2'"),
        ("generation_config.json", '{"eos_token_id": [-1]}', "eos_token_id has '-1'"),
        ("chat_template.jinja", b"\xff", "no UTF-8"),
    ],
)
def test_damaged_files_are_refused_by_name(
    file: str, content: str | bytes, problem: str, tmp_path: Path
) -> None:
    write(tmp_path, byte_level())
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=problem) as raised:
        Tokenizer.from_directory(tmp_path)
    assert file in str(raised.value)
    assert len(str(raised.value)) < 800


def test_huge_files_and_ids_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, byte_level())
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"]["vocab"]["far"] = 4_000_000_000
    write(tmp_path, tokenizer__json=spec)
    with pytest.raises(CheckpointError, match="token ids go up to 4000000000"):
        Tokenizer.from_directory(tmp_path)
    monkeypatch.setattr(hf_tokenizer, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(CheckpointError, match="more than 1000 bytes"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_file_with_any_change_is_read_or_refused(tmp_path: Path) -> None:
    data = (write(tmp_path, sentencepiece_like()) / "tokenizer.json").read_bytes()
    rng = random.Random(0)
    refusals: list[Exception] = []
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.choice(b'{}[]",:0919ab_\\')
        (tmp_path / "tokenizer.json").write_bytes(changed)
        try:
            Tokenizer.from_directory(tmp_path).encode("a b")
        except (CheckpointError, UnsupportedModelError) as error:
            refusals.append(error)
    assert len(refusals) > 50
    assert all("tokenizer.json" in str(error) for error in refusals)


@pytest.mark.parametrize(
    ("decoder", "problem"),
    [
        (None, "no decoder"),
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Fuse(), "its decoder is"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]), "the step"),
        (decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), "the step"),
    ],
)
def test_other_decoders_are_refused(decoder: Any, problem: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    if decoder is None:
        spec = json.loads(tokenizer.to_str())
        write(tmp_path, tokenizer__json={**spec, "decoder": None})
    else:
        tokenizer.decoder = decoder
        write(tmp_path, tokenizer)
    with pytest.raises(UnsupportedModelError, match=problem):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("model", [models.Unigram([("a", -1.0)]), models.WordLevel({"a": 0}, "<unk>")])
def test_a_vocabulary_without_an_unknown_token_is_refused(tmp_path: Path, model: models.Model) -> None:
    tokenizer = RustTokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="can't encode with it"):
        Tokenizer.from_directory(write(tmp_path, tokenizer))


def test_an_unknown_token_that_is_not_there_is_refused(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like()
    tokenizer.model.unk_token = "<nowhere>"
    with pytest.raises(CheckpointError, match="unknown token '<nowhere>'"):
        Tokenizer.from_directory(write(tmp_path, tokenizer))


def test_two_tokens_before_a_text_are_refused(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> </s> $A", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    with pytest.raises(UnsupportedModelError, match="puts 2 tokens before a text"):
        Tokenizer.from_directory(write(tmp_path, tokenizer))
