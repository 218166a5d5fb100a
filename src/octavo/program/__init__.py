"""What a model is, independent of any device."""
