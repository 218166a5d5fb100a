"""Settings: their schema, and how they are resolved."""
