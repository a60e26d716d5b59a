"""Convert a checkpoint to another format.

    cpmrt convert MODEL FILE.gguf --type q4_k                   for llama.cpp and what is built on it
    cpmrt convert MODEL FOLDER --to safetensors                 16-bit weights, of a GGUF file or any other format
    cpmrt convert MODEL FOLDER --to marlin                      symmetric 4-bit GPTQ to the layout of CPM.cu
    cpmrt convert MODEL FOLDER --to gptq                        and back

MODEL is a folder, a .gguf file or a hub id; FILE or FOLDER must not exist. Between GPTQ and Marlin codes and scales
only change places: there and back gives the same bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cpmrt.cli.output import note
from cpmrt.cli.parser import UsageError
from cpmrt.quantization.gguf_conversion import FILE_TYPES, to_gguf
from cpmrt.quantization.marlin_conversion import convert
from cpmrt.quantization.outputs import check_new
from cpmrt.quantization.plain_conversion import to_safetensors
from cpmrt.weights.gguf.names import has_gguf_suffix
from cpmrt.weights.model_folder import ModelFolder


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="folder or hub id of a checkpoint, or a .gguf file; 'demo' is the bundled one"
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder or .gguf file to make")
    parser.add_argument(
        "--to", choices=("marlin", "gptq", "gguf", "safetensors"),
        help="the format to write (default: gguf where TARGET ends with .gguf, otherwise marlin)",
    )  # fmt: skip
    parser.add_argument(
        "--type", type=str.lower, choices=FILE_TYPES,
        help="with --to gguf: what its matrices are stored as (default: bf16)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Make the target. Raises CheckpointError, ConfigError, UnsupportedModelError, and leaves nothing of it then."""
    made = args.to or ("gguf" if has_gguf_suffix(args.target.name) else "marlin")
    if args.type is not None and made != "gguf":
        raise UsageError("--type is for --to gguf")
    check_new(args.target, "file" if made == "gguf" else "folder")
    folder = ModelFolder.open(args.source)
    if made == "gguf":
        to_gguf(folder, args.target, args.type or "bf16")
    elif made == "safetensors":
        to_safetensors(folder, args.target)
    else:
        convert(folder, args.target, back=made == "gptq")
    note(f"{args.target}: done")
    return 0
