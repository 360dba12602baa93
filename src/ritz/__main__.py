"""`python -m ritz`: the command line, where the script `ritz` is not on the path."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
