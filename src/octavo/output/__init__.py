"""From sampled token ids back to text."""
