"""What the load generator asks: made-up prompts of given lengths, or conversations from a file.

Rule: a seed gives the same requests in the same order, whatever the server and however fast it is.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

# Words that are one token each in most vocabularies, so that a prompt has about as many tokens as words.
_WORDS = """
about after again air all also always and animal another answer any around ask away back because been
before began being below between big book both boy built call came can car carry change children city
close cold come could country cut day different door down each earth eat end enough even every example
eye face family far farm father feet few find fire first fish follow food form found four friend from
garden gave girl give gold good great green grow half hand hard have head hear help here high hold home
horse hour house idea island keep kind king know land large last late learn leave left letter life light
line list little live long look made make many mark mean might mile moon more morning mother mountain
move much music must name near need never next night north note number often old one open order other
over own page paper part people place plan plant play point press problem quick rain read red rest right
river road rock room round run same school sea second seem sentence ship short should show side simple
small snow some song soon sound south space stand star start state still stone stop story street study
such summer sun table take talk tell them think three time together took town travel tree true turn
under until use very voice walk wall want warm watch water way week well went west what when where white
whole why wind winter with wood word work world write year young
"""
_VOCABULARY = _WORDS.split()
_TOKENS_PER_WORD = 4 / 3  # English text in today's vocabularies
_PEOPLE = {"human", "user"}
_MODELS = {"gpt", "assistant", "chatgpt", "bard", "model"}


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and how many tokens its answer may have."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths: low..high, evenly, or evenly in their logarithm (few are long)."""

    low: int
    high: int
    log: bool = False

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """128, 32:256 or log:32:1024; ConfigError, naming the flag, for anything else."""
        log = text.startswith("log:")
        parts = text.removeprefix("log:").split(":")
        if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 2:
            raise ConfigError(
                f"{flag} is {text[:60]!r}; give a length such as 128, a range 32:256, or log:32:1024, a "
                "range of which few are long"
            )
        low, high = int(parts[0]), int(parts[-1])
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} is {text[:60]!r}; lengths are 1 or more, the smaller first")
        return cls(low, high, log)

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.log:
            return round(self.low * math.pow(self.high / self.low, rng.random()))
        return rng.randint(self.low, self.high)


def synthetic(
    *, prompt_words: Lengths, max_tokens: Lengths, shared_prefix: float = 0.0, seed: int = 0
) -> Iterator[Job]:
    """Prompts of random words, without end.

    shared_prefix: the share of each prompt, from its beginning, that is the same in all of them.
    """
    rng = random.Random(seed)
    num_shared = math.ceil(shared_prefix * prompt_words.high)
    shared = random.Random(f"shared {seed}").choices(_VOCABULARY, k=num_shared)
    while True:
        length = prompt_words.draw(rng)
        prefix = shared[: round(shared_prefix * length)]
        own = rng.choices(_VOCABULARY, k=length - len(prefix))
        yield Job(" ".join(prefix + own), max_tokens.draw(rng))


def conversations(path: Path, *, max_tokens: Lengths | None = None, seed: int = 0) -> Iterator[Job]:
    """First questions of a file in ShareGPT's form, in random order, again and again.

    The file is a JSON list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}.
    An answer may be as long as max_tokens draws, or else as the entry's own "max_tokens" says, or else as
    the reply in the file is, at 4/3 tokens a word. Entries that do not begin with a question and a reply
    are left out. ConfigError, at once, names the entry that is malformed.
    """
    jobs = list(_read(path, max_tokens, random.Random(f"lengths {seed}")))
    if not jobs:
        raise ConfigError(f"{path}: no entry begins with a question by 'human' and a reply by 'gpt'")
    return _shuffled(jobs, random.Random(seed))


def _shuffled(jobs: list[Job], rng: random.Random) -> Iterator[Job]:
    while True:
        yield from rng.sample(jobs, len(jobs))


def _read(path: Path, max_tokens: Lengths | None, rng: random.Random) -> Iterator[Job]:
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read the dataset {path}: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: a dataset is a JSON list, and this is a {type(entries).__name__}")
    for index, entry in enumerate(entries):
        where = f"{path}: entry {index}"
        turns = _turns(entry, where)
        if len(turns) < 2 or turns[0][0] not in _PEOPLE or turns[1][0] not in _MODELS or not turns[0][1]:
            continue
        limit = _own_limit(entry, where) or max(1, round(len(turns[1][1].split()) * _TOKENS_PER_WORD))
        yield Job(turns[0][1], max_tokens.draw(rng) if max_tokens is not None else limit)


def _turns(entry: Any, where: str) -> list[tuple[str, str]]:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f'{where} has no list "conversations"')
    for number, turn in enumerate(turns[:2]):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
            raise ConfigError(
                f'{where}: turn {number} needs texts as "from" and "value"; it is {turn!r:.200}'
            )
    return [(turn["from"], turn["value"]) for turn in turns[:2]]


def _own_limit(entry: dict[str, Any], where: str) -> int | None:
    limit = entry.get("max_tokens")
    if limit is not None and not (type(limit) is int and limit >= 1):
        raise ConfigError(f'{where}: "max_tokens" is {limit!r:.60}; it must be a whole number, 1 or more')
    return limit
