"""`python -m slidedp` is the command `slidedp`."""

import sys

from slidedp.cli import main

if __name__ == "__main__":
    sys.exit(main())
