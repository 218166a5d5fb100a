"""Model families as programs, one file each."""
