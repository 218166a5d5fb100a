"""What is served, in the words of people and of /v1/models."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv_cache.sizing import MemoryBill
from octavo.scheduler.policy import Policy


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model. It crosses to other processes, so it holds plain values.

    isa: of the native kernels; empty on other backends. fingerprint: OpenAI's system_fingerprint.
    """

    name: str
    backend: str
    isa: str
    fingerprint: str
    weight_formats: str
    kv_dtype: str
    policy: Policy
    max_model_len: int
    vocab_size: int
    bill: MemoryBill
    load_seconds: float
