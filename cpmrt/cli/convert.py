"""Convert a symmetric 4-bit GPTQ checkpoint to the Marlin layout of CPM.cu, or back.

SOURCE is a folder; TARGET must not exist. Codes and scales only change places: there and back gives the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cpmrt.cli.output import note
from cpmrt.quantization.marlin_conversion import convert


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="folder of a 4-bit checkpoint")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to make")
    parser.add_argument(
        "--to", choices=("marlin", "gptq"), default="marlin", help="the layout to write (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the folder. Raises CheckpointError, ConfigError, UnsupportedModelError, and nothing is left of it then."""
    convert(args.source, args.target, back=args.to == "gptq")
    note(f"{args.target}: done")
    return 0
