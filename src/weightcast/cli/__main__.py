"""`python -m weightcast.cli`."""

from __future__ import annotations

import sys

from weightcast.cli import main

if __name__ == "__main__":
    sys.exit(main())
