"""`python -m lightning_ptdp` is the command `ptdp`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
