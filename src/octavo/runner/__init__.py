"""Owns every tensor; runs steps and samples."""

import octavo.backends as _backends  # noqa: F401  before torch: see there
