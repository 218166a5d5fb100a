"""What the engine and the server say of themselves: counters, times, and what was slow."""
