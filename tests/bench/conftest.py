"""Fixtures that these tests share with others."""

from __future__ import annotations

from serving import tiny_path

__all__ = ["tiny_path"]
