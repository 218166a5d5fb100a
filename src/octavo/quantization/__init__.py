"""Weight formats and their packing."""
