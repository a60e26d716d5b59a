"""Converts a symmetric 4-bit GPTQ checkpoint (group size 128 or -1) to CPM.cu's Marlin layout, and back.

    python tools/gptq2marlin.py GPTQ_FOLDER NEW_FOLDER
    python tools/gptq2marlin.py --back MARLIN_FOLDER NEW_FOLDER

Codes and scales only change places: there and back gives the same bits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from quantization.marlin import gptq_to_marlin, marlin_to_gptq  # noqa: E402

from cpmrt.errors import CpmrtError  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 an error that a message explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--back", action="store_true", help="from Marlin to GPTQ")
    options = parser.parse_args(arguments)
    try:
        (marlin_to_gptq if options.back else gptq_to_marlin)(options.source, options.target)
    except CpmrtError as error:
        print(f"gptq2marlin.py: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
