"""`python -m octavo`: the `octavo` command."""

from __future__ import annotations

from octavo.cli import main

if __name__ == "__main__":
    main()
