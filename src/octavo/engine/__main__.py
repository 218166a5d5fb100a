"""`python -m octavo.engine`: see `core_process`, which this starts.

Rule: nothing is collected until everything is loaded, since all of it stays: walking it again and again takes
a tenth of the start.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()

    from octavo.engine.core_process import main

    main()
