"""`cpmrt bench` from the source tree: python3 tools/bench.py --shape minicpm4-8b --case 1024:128 --json FILE."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cpmrt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
