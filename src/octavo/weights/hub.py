"""Models on a hub: how one is named, and which of a repository's files are needed.

    [hf:|modelscope:]org/name[@revision][:quantisation or file.gguf]

Rule: names come from a server, so none is used that could lead out of a directory. Nothing is fetched
that is not opened: no pickles, no other frameworks' files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.model_directory import CONFIG, INDEX, MAX_INDEX_BYTES, SINGLE, read_json_object

HUGGING_FACE, MODELSCOPE = "hf", "modelscope"
_SHOWN_FILES = 40
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_ID = re.compile(
    rf"(?:(?P<hub>{HUGGING_FACE}|{MODELSCOPE}):)?(?P<repo>{_NAME}/{_NAME})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9_./-]{0,199}))?(?::(?P<file>[A-Za-z0-9][A-Za-z0-9_./-]{0,199}))?"
)
#: A path within a repository that stays there: no empty, hidden, absolute or parent component.
_SAFE = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}(/[A-Za-z0-9_][\w.+-]{0,199}){0,8}", re.ASCII)
#: Besides config.json and the weights: what the tokenizer, the template and the defaults are read from.
_BESIDES = re.compile(
    r"generation_config\.json|tokenizer[\w.-]*\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template[\w.-]*\.(json|jinja)|additional_chat_templates/[\w.-]+\.jinja",
    re.ASCII,
)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_QUANTISATION = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP4|NVFP4|BF16|F16|F32|FP16)\w*", re.IGNORECASE)
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on a hub. revision: a branch, a tag or a commit; None: the hub's default. file: what names
    the GGUF file, None where that is left open."""

    hub: str
    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        hub = f"{self.hub}:" if self.hub != HUGGING_FACE else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{hub}{self.repo}{revision}{f':{self.file}' if self.file else ''}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The files that make up a model. target: the one to open; "" for the directory they lie in."""

    files: tuple[str, ...]
    target: str = ""


def parse_hub_id(name: str) -> HubId | None:
    """What `name` means on a hub; None if it can't be one."""
    match = _ID.fullmatch(name)
    if match is None or any(part in ("", ".", "..") for part in (match["revision"] or "a").split("/")):
        return None
    return HubId(match["hub"] or HUGGING_FACE, match["repo"], match["revision"], match["file"])


def is_safe(name: str) -> bool:
    """Whether a repository's path can't lead out of the directory it is put in."""
    return _SAFE.fullmatch(name) is not None


def is_beside(name: str) -> bool:
    """Whether a repository's file says something that weights and config.json leave open."""
    return is_safe(name) and _BESIDES.fullmatch(name) is not None


def choose_files(names: Collection[str], hub_id: HubId) -> Choice:
    """The files of a repository that make up the model; UnsupportedModelError says what is there instead."""
    safe = sorted(filter(is_safe, names))
    ggufs = [name for name in safe if name.lower().endswith(".gguf") and "mmproj" not in name.lower()]
    if hub_id.file is not None:
        return _choose_gguf(_named(ggufs, hub_id.file), ggufs, hub_id)
    weights = _safetensors(safe)
    if CONFIG in safe and weights:
        return Choice((CONFIG, *weights, *filter(is_beside, safe)))
    if ggufs:
        return _choose_gguf(ggufs, ggufs, hub_id)
    pickles = [name for name in safe if name.lower().endswith(_PICKLES)]
    if CONFIG in safe and pickles:
        raise _refusal(
            hub_id,
            f"has its weights as {_list(pickles)} only. Those are pickles, which are not fetched. Where you "
            f"trust them: `hf download {hub_id.repo} --local-dir DIRECTORY`, then `octavo convert DIRECTORY "
            "OUT`, and serve OUT",
        )
    raise _refusal(hub_id, f"holds neither a {CONFIG} with *.safetensors nor a .gguf file, but {_list(safe)}")


def cached_choice(
    folder: Path, present: Collection[str], names: Collection[str], hub_id: HubId
) -> Choice | None:
    """The same where a hub can't be asked; None unless the whole of it is in the folder.

    present: the files there. names: what is known of those that the repository has.
    """
    try:
        choice = choose_files(names, hub_id)
        needed = set(choice.files)
        if INDEX in needed & set(present):
            shards = read_json_object(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
            needed |= set(shards.values()) if isinstance(shards, dict) else set()
    except (UnsupportedModelError, CheckpointError, TypeError):
        return None
    return choice if needed <= set(present) else None


def check_not_split(path: str) -> None:
    """Raise UnsupportedModelError if a GGUF file is one part of several."""
    match = _SPLIT.search(path)
    if match is not None and int(match[2]) > 1:
        first = f"{path[: match.start()]}-00001-of-{match[2]}.gguf"
        raise UnsupportedModelError(
            f"{path} is part {int(match[1])} of a model split into {int(match[2])} files, which are not read "
            f"as they are. Merge them: `llama-gguf-split --merge {first} merged.gguf`, and serve "
            "merged.gguf; or choose a quantisation that is in one file"
        )


def _safetensors(names: Collection[str]) -> tuple[str, ...]:
    """What holds the weights, as `SafetensorsCheckpoint` would read them."""
    if SINGLE in names:
        return (SINGLE,)
    if INDEX not in names:
        return ()
    # Some repositories hold the same weights once more under the names of another program.
    shards = (name for name in names if name.endswith(".safetensors") and "/" not in name)
    return (INDEX, *(name for name in shards if not name.startswith(("consolidated", "adapter_"))))


def _named(ggufs: Iterable[str], wanted: str) -> list[str]:
    """The files of that name, or else those whose names hold that quantisation as a word of its own."""
    ggufs = list(ggufs)
    exact = [name for name in ggufs if wanted in (name, name.rpartition("/")[2])]
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return exact or [name for name in ggufs if word.search(name.rpartition("/")[2])]


def _choose_gguf(matching: list[str], ggufs: list[str], hub_id: HubId) -> Choice:
    if len(matching) == 1:
        check_not_split(matching[0])
        return Choice((matching[0],), matching[0])
    if not ggufs:
        raise _refusal(hub_id, "has no .gguf files, so nothing can be chosen after a colon; leave that out")
    if matching and len({_SPLIT.sub("", name) for name in matching}) == 1:
        check_not_split(matching[0])
    quantisations = [_QUANTISATION.findall(name.rpartition("/")[2].removesuffix(".gguf")) for name in ggufs]
    example = min((found[-1] for found in quantisations if found), default=ggufs[0].rpartition("/")[2])
    problem = (
        f"has {len(matching)} files called like {hub_id.file!r}" if hub_id.file else "has several .gguf files"
    )
    raise _refusal(
        hub_id,
        f"{problem}; say which one, by its quantisation or its name: "
        f"`{HubId(hub_id.hub, hub_id.repo)}:{example}`. There are {_list(ggufs)}",
    )


def _list(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:_SHOWN_FILES]) or "nothing of use"
    return f"{shown} and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else shown


def _refusal(hub_id: HubId, problem: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{hub_id.repo} {problem}")
