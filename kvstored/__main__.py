"""`python -m kvstored`: the same as the `kvstored` command."""

import sys

from kvstored.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
