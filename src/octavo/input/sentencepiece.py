"""SentencePiece vocabularies: reads `tokenizer.model`, and builds what encodes like it.

Rule: nothing of the file is trusted, and only what changes token ids is read. The file is a protobuf
message (sentencepiece_model.proto); the wire format needs no library.

SentencePiece's BPE has scores instead of merges: among all neighbours that join to a piece, the piece
with the highest score wins. So every way to cut a piece into two pieces is a merge, ranked by score.
Known differences, which Hugging Face's tokenizers share: where two cuts of the same piece overlap in a
text, SentencePiece takes the left one; and text after a special or user-defined token gets the space
prefix, as at the start, while such a token at the start gets none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tokenizers import AddedToken, Regex, normalizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, Unigram

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.input.vocabulary import BYTE, CONTROL, NORMAL, SPACE_MARK, UNKNOWN, UNUSED, USER_DEFINED

#: Longer pieces than this are no words; cutting them in every place would take the square of that.
MAX_PIECE_CHARACTERS = 1024
_UNIGRAM, _BPE = 1, 2
_KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """Pieces by id, and how text is prepared for them. An id below 0 means there is no such token."""

    pieces: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    is_unigram: bool = False
    adds_space_prefix: bool = True
    collapses_spaces: bool = False
    characters_map: bytes = b""
    bos_id: int = -1
    eos_id: int = -1

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are never part of the text."""
        return frozenset(i for i, kind in enumerate(self.kinds) if kind in (UNKNOWN, CONTROL))

    def build(self) -> RustTokenizer:
        """A tokenizer that encodes as SentencePiece does. Raises CheckpointError for contradictions."""
        try:
            engine = RustTokenizer(self._unigram() if self.is_unigram else self._bpe())
            engine.normalizer = self._normalizer()
        except CheckpointError:
            raise
        except Exception as error:  # the library raises plain Exception
            _fail(f"its pieces do not fit together ({error})")
        special, ordinary = (CONTROL, UNKNOWN), (USER_DEFINED,)
        for add, kinds in ((engine.add_special_tokens, special), (engine.add_tokens, ordinary)):
            add(
                [
                    AddedToken(piece, special=kinds is special, normalized=False)
                    for piece, kind in zip(self.pieces, self.kinds, strict=True)
                    # Runs of spaces are no words to look out for: they come of merging.
                    if kind in kinds and SPACE_MARK not in piece
                ]
            )
        return engine

    def _unknown(self) -> int | None:
        return next((i for i, kind in enumerate(self.kinds) if kind == UNKNOWN), None)

    def _has_bytes(self) -> bool:
        return sum(kind == BYTE for kind in self.kinds) == 256

    def _bpe(self) -> BPE:
        vocab: dict[str, int] = {}
        for token_id, piece in enumerate(self.pieces):
            vocab.setdefault(piece, token_id)
        unknown = self._unknown()
        return BPE(
            vocab=vocab,
            merges=self._merges(vocab),
            unk_token=None if unknown is None else self.pieces[unknown],
            fuse_unk=True,
            byte_fallback=self._has_bytes(),
        )

    def _merges(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        joined = {
            piece: score
            for piece, score, kind in zip(self.pieces, self.scores, self.kinds, strict=True)
            if kind in (NORMAL, USER_DEFINED)
        }
        ranked = []
        for piece, score in joined.items():
            cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            for left, right in cuts:
                if left in joined and right in joined:
                    ranked.append((-score, vocab[piece], vocab[left], vocab[right], left, right))
        ranked.sort()
        return [(left, right) for *_, left, right in ranked]

    def _unigram(self) -> Unigram:
        return Unigram(
            list(zip(self.pieces, self.scores, strict=True)),
            unk_id=self._unknown(),
            byte_fallback=self._has_bytes(),
        )

    def _normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self.characters_map:
            steps.append(normalizers.Precompiled(self.characters_map))
        if self.collapses_spaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if self.adds_space_prefix:
            steps.append(normalizers.Prepend(SPACE_MARK))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """The model in the bytes of a `tokenizer.model`.

    Raises CheckpointError for bytes that are none, UnsupportedModelError for word and character models.
    """
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, int] = {}
    normalizer: dict[int, int] = {}
    characters_map = b""
    for number, value in _fields(data):
        if number == 1:
            piece, score, kind = _piece(_as_bytes(value), len(pieces))
            pieces.append(piece)
            scores.append(score)
            kinds.append(kind)
        elif number == 2:
            trainer = {key: item for key, item in _fields(_as_bytes(value)) if isinstance(item, int)}
        elif number == 3:
            for key, item in _fields(_as_bytes(value)):
                if isinstance(item, int):
                    normalizer[key] = item
                elif key == 2:
                    characters_map = item
    if not pieces:
        _fail("it has no pieces")
    model_type = trainer.get(3, _UNIGRAM)
    if model_type not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(
            f"the tokenizer is a SentencePiece model of type {model_type}; served are unigram (1) and BPE (2)"
        )
    if trainer.get(24, 0):
        raise UnsupportedModelError("the tokenizer writes spaces after words (treat_whitespace_as_suffix)")
    return SentencePieceModel(
        pieces,
        scores,
        kinds,
        is_unigram=model_type == _UNIGRAM,
        adds_space_prefix=bool(normalizer.get(3, 1)),
        collapses_spaces=bool(normalizer.get(4, 1)),
        characters_map=characters_map,
        bos_id=_id_of_kind(trainer.get(41, 1), kinds),
        eos_id=_id_of_kind(trainer.get(42, 2), kinds),
    )


def _id_of_kind(token_id: int, kinds: Sequence[int]) -> int:
    """A trainer's id, where the pieces have it as a control token; such as are off are -1 or wrapped."""
    return token_id if 0 <= token_id < len(kinds) and kinds[token_id] == CONTROL else -1


def _piece(data: bytes, index: int) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            try:
                text = _as_bytes(value).decode()
            except UnicodeDecodeError:
                _fail(f"piece {index} is no UTF-8")
        elif number == 2:
            if not isinstance(value, bytes) or len(value) != 4:
                _fail(f"the score of piece {index} is no float")
            score = struct.unpack("<f", value)[0]
        elif number == 3 and isinstance(value, int):
            kind = value
    if not text or len(text) > MAX_PIECE_CHARACTERS:
        _fail(f"piece {index} has {len(text)} characters; 1 to {MAX_PIECE_CHARACTERS} make sense")
    if kind not in _KINDS or score != score:
        _fail(f"piece {index} is of kind {kind} and has the score {score}")
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message: int for varints, bytes for the rest."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        read = _READERS.get(wire_type)
        if read is None or number == 0:
            _fail(f"byte {at} starts a field of wire type {wire_type}")
        value, at = read(data, at)
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    return _fail(f"the number at byte {at} does not end")


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _varint(data, at)
    return _take(data, at, size)


def _take(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        _fail(f"the field at byte {at} has {size} bytes, but {len(data) - at} are left")
    return data[at : at + size], at + size


_READERS: dict[int, Callable[[bytes, int], tuple[int | bytes, int]]] = {
    0: _varint,
    1: lambda data, at: _take(data, at, 8),
    2: _sized,
    5: lambda data, at: _take(data, at, 4),
}


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        _fail("a text field holds a number")
    return value


def _fail(problem: str) -> NoReturn:
    raise CheckpointError(f"the SentencePiece tokenizer is damaged: {problem}; fetch the model again")
