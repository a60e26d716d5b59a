"""`python -m cpmrt` is the command `cpmrt`."""

import sys

from cpmrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
