"""The reference backend: readable, row-invariant, any CPU."""
