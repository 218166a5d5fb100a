"""The tokenizer of a Hugging Face model directory.

Rule: files are read as data and never trusted: sizes are capped, every error names its file, and no code
of the repository is run. tokenizer.json says how text becomes ids, tokenizer_config.json which tokens
begin and end a text and whether BOS is added, generation_config.json and config.json which others end
an answer; where they differ, all of them do. tokenizer.model (SentencePiece) is read where there is no
tokenizer.json.

`clean_up_tokenization_spaces` is not followed: it takes spaces out of the text the model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.input.sentencepiece import parse_sentencepiece
from octavo.input.vocabulary import (
    SPACE_MARK,
    UNUSED,
    LeadingSpace,
    TokenizerParts,
    byte_level_bytes,
    sentencepiece_bytes,
    steps_of,
    turn_off_sampling,
)

MAX_TOKENIZER_BYTES = 512 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TOKEN_ID = 1 << 22
_TOKENIZER, _SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_IN_NO_VOCABULARY = "\U0010fffd\u9fa0"


def parts_from_directory(directory: Path) -> TokenizerParts:
    """See Tokenizer.from_directory."""
    config = _read_object(directory / _CONFIG)
    if (directory / _TOKENIZER).is_file():
        return _from_json(directory, config)
    if (directory / _SENTENCEPIECE).is_file():
        return _from_sentencepiece(directory, config)
    raise CheckpointError(
        f"{directory}: there is no {_TOKENIZER} and no {_SENTENCEPIECE}, so text can't become tokens; fetch "
        "the model's tokenizer files too"
    )


def _from_json(directory: Path, config: Mapping[str, Any]) -> TokenizerParts:
    path = directory / _TOKENIZER
    data = _read(path, MAX_TOKENIZER_BYTES)
    try:
        engine = RustTokenizer.from_buffer(data)
    except BaseException as error:  # a Rust panic is a BaseException, other errors plain Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        _fail(path, f"the tokenizers library can't read it: {str(error)[:300]}", error)
    engine.no_truncation()
    engine.no_padding()
    turn_off_sampling(engine)
    unknown = engine.model.unk_token if isinstance(engine.model, BPE) else None
    if unknown is not None and engine.model.token_to_id(unknown) is None:
        _fail(path, f"its unknown token {unknown[:80]!r} is not in its vocabulary")
    vocab = engine.get_vocab(with_added_tokens=True)
    if not vocab or max(vocab.values()) > MAX_TOKEN_ID:
        _fail(path, f"its token ids go up to {max(vocab.values(), default=None)}, which no vocabulary needs")
    byte_level, leading_space = _decoder_of(path, engine)
    to_bytes = byte_level_bytes if byte_level else sentencepiece_bytes
    added = engine.get_added_tokens_decoder()
    token_bytes = [b""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        # In the byte alphabet, added tokens are plain text.
        plain = byte_level and token_id in added
        token_bytes[token_id] = token.encode() if plain else to_bytes(token)
    _check_unknown(path, engine)
    prefix = _prefix_of(path, engine)
    bos_id = prefix if prefix is not None else _named_token(directory, config, "bos_token", vocab)
    adds_bos = config.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = prefix is not None
    return TokenizerParts(
        engine=engine,
        token_bytes=token_bytes,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        bos_id=bos_id,
        eos_ids=_eos_ids(directory, config, vocab, len(token_bytes)),
        adds_bos=adds_bos and bos_id is not None,
        leading_space=leading_space,
        chat_templates=_chat_templates(directory, config),
    )


def _from_sentencepiece(directory: Path, config: Mapping[str, Any]) -> TokenizerParts:
    path = directory / _SENTENCEPIECE
    try:
        model = parse_sentencepiece(_read(path, MAX_TOKENIZER_BYTES))
        engine = model.build()
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error}") from error
    special_ids = set(model.special_ids)
    token_bytes = [
        b"" if kind == UNUSED else piece.encode() if token_id in special_ids else sentencepiece_bytes(piece)
        for token_id, (piece, kind) in enumerate(zip(model.pieces, model.kinds, strict=True))
    ]
    for token_id, token in sorted(_added_tokens(directory, config).items()):
        if not token.content:
            _fail(directory / _CONFIG, f"added token {token_id} is empty")
        (engine.add_special_tokens if token.special else engine.add_tokens)([token])
        if engine.token_to_id(token.content) != token_id:
            _fail(
                directory / _CONFIG,
                f"added token {token.content[:80]!r} has the id {token_id}, but the next free one is "
                f"{engine.token_to_id(token.content)}",
            )
        if token_id == len(token_bytes):
            token_bytes.append(b"")
        token_bytes[token_id] = token.content.encode()
        if token.special:
            special_ids.add(token_id)
    vocab = engine.get_vocab(with_added_tokens=True)
    bos_id = _named_token(directory, config, "bos_token", vocab)
    if bos_id is None and model.bos_id >= 0:
        bos_id = model.bos_id
    adds_bos = config.get("add_bos_token", True)
    return TokenizerParts(
        engine=engine,
        token_bytes=token_bytes,
        special_ids=frozenset(special_ids),
        bos_id=bos_id,
        eos_ids=_eos_ids(directory, config, vocab, len(token_bytes), default=model.eos_id),
        adds_bos=bool(adds_bos) and bos_id is not None,
        leading_space=LeadingSpace.ONE if model.adds_space_prefix else LeadingSpace.KEPT,
        chat_templates=_chat_templates(directory, config),
    )


def _decoder_of(path: Path, engine: RustTokenizer) -> tuple[bool, LeadingSpace]:
    """Whether tokens are written in the byte alphabet, and what the first one loses."""
    if engine.decoder is None:
        _unsupported(path, "it has no decoder")
    steps = steps_of(engine.decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, LeadingSpace.KEPT
    leading = LeadingSpace.KEPT
    fused = False
    for step in steps:
        match step:
            case {"type": "ByteFallback"}:
                pass
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "} if mark == SPACE_MARK:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                leading = LeadingSpace.ONE
            case {"type": "Metaspace", "replacement": mark} if mark == SPACE_MARK and not fused:
                keeps = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
                leading = LeadingSpace.KEPT if keeps else LeadingSpace.ALL_OF_FIRST_TOKEN
            case _:
                _unsupported(path, f"its decoder has the step {json.dumps(step)[:200]}")
    if not {"Replace", "Metaspace"} & set(kinds):
        _unsupported(path, f"its decoder is {json.dumps(steps)[:200]}")
    return False, leading


def _check_unknown(path: Path, engine: RustTokenizer) -> None:
    """Refuse a tokenizer that has no token for what is in none, and says so only when it meets that."""
    try:
        engine.encode(_IN_NO_VOCABULARY, add_special_tokens=False)
    except Exception as error:  # the library raises plain Exception
        _fail(path, f"the tokenizers library can't encode with it: {str(error)[:300]}", error)


def _prefix_of(path: Path, engine: RustTokenizer) -> int | None:
    """The token that the tokenizer puts before every text, where it does."""
    try:
        bare = engine.encode("a", add_special_tokens=False).ids
        full = engine.encode("a", add_special_tokens=True).ids
    except Exception as error:  # the library raises plain Exception
        _fail(path, f"the tokenizers library can't encode with it: {str(error)[:300]}", error)
    for size in range(len(full) - len(bare) + 1):
        if full[size : size + len(bare)] == bare:
            if size > 1:
                _unsupported(path, f"it puts {size} tokens before a text ({full[:size]}), not one")
            return full[0] if size else None
    return None


def _named_token(
    directory: Path, config: Mapping[str, Any], key: str, vocab: Mapping[str, int]
) -> int | None:
    for source in (config, _read_object(directory / "special_tokens_map.json")):
        token = source.get(key)
        if isinstance(token, Mapping):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str) or token not in vocab:
            _fail(directory / _CONFIG, f"{key} is {str(token)[:80]!r}, which is no token of the vocabulary")
        return vocab[token]
    return None


def _eos_ids(
    directory: Path,
    config: Mapping[str, Any],
    vocab: Mapping[str, int],
    vocab_size: int,
    *,
    default: int = -1,
) -> tuple[int, ...]:
    """The tokenizer's EOS first, then what generation_config.json and config.json add. default: the
    tokenizer's where its config names none; below 0: it has none."""
    named = _named_token(directory, config, "eos_token", vocab)
    if named is None and default >= 0:
        named = default
    ids = [] if named is None else [named]
    for name in ("generation_config.json", "config.json"):
        value = _read_object(directory / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in listed:
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                _fail(directory / name, f"eos_token_id has {str(token_id)[:80]!r}; token ids are integers")
            if token_id < vocab_size:  # ids of the padding end nothing
                ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def _added_tokens(directory: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens beside the SentencePiece model's: tokenizer_config.json's, or else added_tokens.json's."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        path = directory / "added_tokens.json"
        listed = {str(token_id): {"content": token} for token, token_id in _read_object(path).items()}
    if not isinstance(listed, Mapping):
        _fail(directory / _CONFIG, f"added_tokens_decoder is a {type(listed).__name__}, not an object")
    tokens = {}
    for token_id, entry in listed.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not str(token_id).isdecimal() or int(token_id) > MAX_TOKEN_ID or not isinstance(content, str):
            _fail(directory / _CONFIG, f"added token {str(token_id)[:20]!r} is {str(entry)[:80]!r}")
        flags = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
        tokens[int(token_id)] = AddedToken(content, normalized=False, **flags)
    return tokens


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. A file of its own comes before tokenizer_config.json, as in transformers."""
    templates: dict[str, str] = {}
    path = directory / _TEMPLATE
    if path.is_file():
        templates["default"] = _text(path)
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = _text(extra)
    if templates:
        return templates
    for path, source in (
        (directory / _CONFIG, config),
        (directory / "chat_template.json", _read_object(directory / "chat_template.json")),
    ):
        if (value := source.get("chat_template")) is not None:
            return _named_templates(path, value)
    return {}


def _named_templates(path: Path, value: Any) -> dict[str, str]:
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if isinstance(value, Mapping):
        entries = [{"name": name, "template": template} for name, template in value.items()]
    templates = {}
    for entry in entries if isinstance(entries, list) else [None]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                _fail(path, "chat_template is neither text nor a list of objects with name and template")
    return templates


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        _fail(path, f"it is no JSON ({str(error)[:200]})", error)
    if not isinstance(value, dict):
        _fail(path, f"it holds a {type(value).__name__}, not an object")
    return value


def _text(path: Path) -> str:
    try:
        return _read(path, MAX_CONFIG_BYTES).decode()
    except UnicodeDecodeError as error:
        _fail(path, f"it is no UTF-8 ({error.reason} at byte {error.start})", error)


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        _fail(path, f"it can't be read ({error.strerror})", error)
    if len(data) > limit:
        _fail(path, f"it has more than {limit} bytes")
    return data


def _fail(path: Path, problem: str, cause: BaseException | None = None) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}; fetch the file again") from cause


def _unsupported(path: Path, problem: str) -> NoReturn:
    raise UnsupportedModelError(f"{path}: {problem}, which is not served; use another model")
