"""transformers on the CPU: the same file's weights, dequantised, with a plain loop around the model."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import worker


class Transformers:
    """A model in one dtype. KV of the prompts is computed once for each batch size and kept."""

    def __init__(self, path: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        file = Path(path)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        ).eval()
        self._dtype = dtype
        self._prompts: dict[int, tuple[Any, torch.Tensor]] = {}

    def about(self) -> dict[str, Any]:
        """Versions and settings."""
        version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"version": version, "dtype": self._dtype}

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Seconds to the first new token of a prompt."""
        ids = self._ids([worker.MAX_BATCH], tokens)
        started = time.perf_counter()
        self._forward(ids, None)
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        """Seconds of `steps` new tokens of each sequence."""
        if batch not in self._prompts:
            self._prompts[batch] = self._forward(self._ids(range(batch), worker.PROMPT), None)
        cache, tokens = copy.deepcopy(self._prompts[batch])  # it is written to
        started = time.perf_counter()
        for _ in range(steps):
            cache, tokens = self._forward(tokens, cache)
        return time.perf_counter() - started

    def _ids(self, seeds: Any, length: int) -> torch.Tensor:
        vocab_size = self._model.config.vocab_size
        return torch.tensor([worker.prompt(seed, length, vocab_size) for seed in seeds])

    def _forward(self, ids: torch.Tensor, cache: Any) -> tuple[Any, torch.Tensor]:
        """The cache and the likeliest token of each row, [batch, 1]."""
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.past_key_values, out.logits[:, -1:].argmax(-1)


if __name__ == "__main__":
    parser = worker.parser(__doc__)
    parser.add_argument("--dtype", required=True)
    args = parser.parse_args()
    worker.serve(lambda: Transformers(args.model, args.threads, args.dtype))
