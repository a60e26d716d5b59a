"""Convert a checkpoint to another format.

    cpmrt convert MODEL FILE.gguf --to gguf --type q4_k        for llama.cpp and what is built on it
    cpmrt convert MODEL FOLDER --to safetensors                 16-bit weights, of a GGUF file or any other format
    cpmrt convert MODEL FOLDER --to marlin                      symmetric 4-bit GPTQ to the layout of CPM.cu
    cpmrt convert MODEL FOLDER --to gptq                        and back

SOURCE is a folder or a .gguf file; TARGET must not exist. Between GPTQ and Marlin codes and scales only change places:
there and back gives the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cpmrt.cli.arguments import UsageError
from cpmrt.cli.output import note
from cpmrt.quantization.gguf_conversion import FILE_TYPES, to_gguf
from cpmrt.quantization.marlin_conversion import convert
from cpmrt.quantization.plain_conversion import to_safetensors
from cpmrt.weights.model_folder import ModelFolder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", type=Path, help="folder of a checkpoint, or a .gguf file")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder or .gguf file to make")
    parser.add_argument(
        "--to", choices=("marlin", "gptq", "gguf", "safetensors"), default="marlin",
        help="the format to write (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--type", choices=FILE_TYPES, help="with --to gguf: what its matrices are stored as (default: bf16)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the target. Raises CheckpointError, ConfigError, UnsupportedModelError, and nothing is left of it then."""
    if args.type is not None and args.to != "gguf":
        raise UsageError("--type is for --to gguf")
    if args.to == "gguf":
        to_gguf(ModelFolder.open(args.source), args.target, args.type or "bf16")
    elif args.to == "safetensors":
        to_safetensors(ModelFolder.open(args.source), args.target)
    else:
        convert(args.source, args.target, back=args.to == "gptq")
    note(f"{args.target}: done")
    return 0
