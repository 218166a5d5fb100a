"""Octavo: an LLM inference engine whose answers do not depend on load."""
