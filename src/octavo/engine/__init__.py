"""The engine: one step loop, and the ways to reach it."""
