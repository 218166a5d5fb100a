"""llama.cpp through the ctypes functions of llama-cpp-python: one context, decoded by batches of sequences.

Each sequence has a stream of its own in the KV cache (kv_unified off), with which llama.cpp is fastest when
sequences share nothing.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
import worker


class Llama:
    """A model and its context. Prompts of the sequences are computed once and their KV kept."""

    def __init__(self, path: str, threads: int, flash_attention: bool) -> None:
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive: the library calls it
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_load_model_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        params = llama_cpp.llama_context_default_params()
        room = worker.PROMPT + worker.MAX_STEPS
        params.n_ctx = (worker.MAX_BATCH + 1) * max(room, worker.MAX_PREFILL + 1)
        params.n_batch = params.n_ubatch = worker.MAX_PREFILL
        params.n_seq_max = worker.MAX_BATCH + 1  # the last one is for prefill
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = int(flash_attention)
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(worker.MAX_PREFILL, 0, 1)
        self._flash_attention = flash_attention
        self._first: list[int] = []  # the token after each prompt that is in the cache

    def about(self) -> dict[str, Any]:
        """Versions and what the library was built for."""
        built = llama_cpp.llama_print_system_info().decode()
        features = [part.split("=")[0].strip() for part in built.split("|") if part.strip().endswith("= 1")]
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "built_for": [feature.removeprefix("CPU :").strip() for feature in features],
            "flash_attention": self._flash_attention,
        }

    def prefill(self, tokens: int) -> float:
        """Seconds to the first new token of a prompt."""
        sequence = worker.MAX_BATCH
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, 0, -1)
        ids = worker.prompt(sequence, tokens, self._vocab_size)
        started = time.perf_counter()
        self._prompt(sequence, ids)
        return time.perf_counter() - started

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of `steps` new tokens of each sequence."""
        for sequence in range(len(self._first), batch):
            ids = worker.prompt(sequence, worker.PROMPT, self._vocab_size)
            self._first.append(self._prompt(sequence, ids))
        for sequence in range(batch):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, worker.PROMPT, -1)
        tokens = self._first[:batch]
        started = time.perf_counter()
        for step in range(steps):
            for sequence, token in enumerate(tokens):
                self._put(sequence, token, worker.PROMPT + step, sequence, wanted=True)
            tokens = self._decode(range(batch))
        return time.perf_counter() - started

    def _prompt(self, sequence: int, ids: list[int]) -> int:
        """Compute a prompt; returns the token after it."""
        for i, token in enumerate(ids):
            self._put(i, token, i, sequence, wanted=i == len(ids) - 1)
        return self._decode([len(ids) - 1])[0]

    def _put(self, i: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[i] = token
        batch.pos[i] = position
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
        batch.logits[i] = wanted
        batch.n_tokens = i + 1

    def _decode(self, wanted: Any) -> list[int]:
        """Run the batch; returns the likeliest token of each wanted row."""
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {self._batch.n_tokens} tokens")
        rows = (llama_cpp.llama_get_logits_ith(self._context, i) for i in wanted)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in rows]


if __name__ == "__main__":
    parser = worker.parser(__doc__)
    parser.add_argument("--no-flash-attention", action="store_true")
    args = parser.parse_args()
    worker.serve(lambda: Llama(args.model, args.threads, not args.no_flash_attention))
