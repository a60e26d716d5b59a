"""The command `cpmrt`, which `python -m cpmrt` is too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the program's own command line and return the exit code; that of Ctrl-C also while it is still imported."""
    try:
        from cpmrt.cli.main import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
