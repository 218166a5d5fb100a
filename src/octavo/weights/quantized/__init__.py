"""Directories of quantised weights: what GPTQ, AWQ, FP8 and compressed-tensors packed, as tensors of types
that the rest of Octavo knows."""
