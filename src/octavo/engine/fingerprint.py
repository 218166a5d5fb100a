"""Says in a few characters what an answer was computed with.

OpenAI's `system_fingerprint`: equal fingerprints and equal seeds promise equal answers. Rule: what the bits
depend on goes in, and nothing else; thread counts, the kernels' instruction set and the file's path don't.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import octavo

_SAMPLES = 64
_SAMPLE_NBYTES = 4096
_HEAD_NBYTES = 1 << 20
#: Beside weights, what an answer depends on in a model's directory.
_SMALL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def fingerprint(path: Path, **settings: object) -> str:
    """ "fp_" and ten hexadecimal digits, for the model at `path` and the settings that its bits depend on.

    Weights are told apart by their size, their head, and 64 samples: a fine-tune differs everywhere, and
    reading gigabytes would cost the start.
    """
    digest = hashlib.sha256(octavo.__version__.encode())
    for name, value in sorted(settings.items()):
        digest.update(f"\0{name}={value!r}".encode())
    if path.is_dir():
        files = [*sorted(path.glob("*.safetensors")), *(path / name for name in _SMALL_FILES)]
    else:
        files = [path]
    for file in files:
        if file.is_file():
            digest.update(f"\0{file.name if path.is_dir() else ''}".encode())
            _add(digest, file)
    return f"fp_{digest.hexdigest()[:10]}"


def _add(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        digest.update(stream.read(_HEAD_NBYTES))
        for i in range(_SAMPLES if size > _HEAD_NBYTES else 0):
            stream.seek(_HEAD_NBYTES + (size - _HEAD_NBYTES) * i // _SAMPLES)
            digest.update(stream.read(_SAMPLE_NBYTES))
