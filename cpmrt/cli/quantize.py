"""Make a 4-bit (W4A16) checkpoint of a 16-bit one, without torch.

    cpmrt quantize MODEL OUT --calibration TEXT                        GPTQ
    cpmrt quantize MODEL OUT --method rtn --group-size 64              round to nearest: no text, but worse
    cpmrt quantize MODEL OUT --method awq --format awq --calibration TEXT
    cpmrt quantize MODEL OUT --method ternary                          -1, 0 or 1 times a scale, in 16-bit tensors

MODEL is a folder or a Hugging Face id; OUT must not exist. The result is a folder of standard GPTQ safetensors (or
AutoAWQ's) with config.json and the tokenizer, for cpmrt, vLLM, transformers and GPTQModel. Embedding and head stay as
they are. Large models need a GPU (--device cuda: CuPy with cuBLAS and cuSOLVER); one layer at a time is on it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.output import note
from cpmrt.config.quantization import TERNARY
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError
from cpmrt.quantization.arrays import open_module
from cpmrt.quantization.calibration import read_texts, token_windows
from cpmrt.quantization.checkpoint_writer import ModelQuantiser
from cpmrt.quantization.formats import FORMATS
from cpmrt.quantization.gptq import GptqSettings
from cpmrt.quantization.grid import GridSettings
from cpmrt.quantization.outputs import check_new
from cpmrt.quantization.recipe import METHODS, QuantisedLayer, Recipe
from cpmrt.quantization.ternary import WRITTEN_GROUP_SIZES, write_ternary
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

_WINDOW = 2048
_CALIBRATED = ("gptq", "awq")
METHODS_OF = {
    "format": METHODS, "asymmetric": METHODS, "search": METHODS, "lm_head": METHODS, "device": METHODS,
    "calibration": _CALIBRATED, "windows": _CALIBRATED, "window": _CALIBRATED, "skip_positions": _CALIBRATED,
    "damping": ("gptq",), "act_order": ("gptq",), "static_groups": ("gptq",),
}  # fmt: skip
"""Option -> the methods that it is for. Options that are not listed are for all methods."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="folder or hub id of the 16-bit checkpoint; 'demo' is the bundled one"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument(
        "--method", choices=(*METHODS, TERNARY), default="gptq",
        help="ternary is for models that were trained for it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=FORMATS, default="gptq",
        help="gptq_v2: zero points stored as they are (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--group-size", type=int, choices=WRITTEN_GROUP_SIZES, default=128,
        help="-1: a whole row; 256 is for ternary (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--asymmetric", action="store_true", help="zero points; always so in format awq")
    parser.add_argument(
        "--search", action=argparse.BooleanOptionalAction,
        help="try scales around those of the largest weights, weighing errors by the inputs (default: not for rtn)",
    )  # fmt: skip
    parser.add_argument("--act-order", action="store_true", help="gptq: columns of large inputs first (desc_act)")
    parser.add_argument("--static-groups", action="store_true", help="gptq: with --act-order, keep groups together")
    parser.add_argument(
        "--damping", type=float, default=0.01, help="gptq: share of the Hessian's mean diagonal (default: %(default)s)"
    )
    parser.add_argument("--calibration", type=Path, help="text or .jsonl file, or a folder of them (gptq and awq)")
    parser.add_argument("--windows", type=int, default=128, help="how many calibration windows (default: %(default)s)")
    parser.add_argument(
        "--window", type=int, help=f"tokens in each (default: {_WINDOW}, or as many as the model takes)"
    )
    parser.add_argument("--skip-positions", type=int, default=0, help="first positions not calibrated on")
    parser.add_argument(
        "--lm-head", nargs="?", type=int, choices=(4, 8), const=4, default=0, metavar="BITS",
        help="quantise the output head too, if it is not tied, to 4 bits (default) or 8",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what computes (default: %(default)s)"
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option with another value than its default that the method ignores (`METHODS_OF`)."""
    parser = argparse.ArgumentParser(add_help=False)
    configure(parser)
    for name, methods in METHODS_OF.items():
        if options.method not in methods and getattr(options, name) != parser.get_default(name):
            of = "method" if len(methods) == 1 else "methods"
            raise ConfigError(
                f"--{name.replace('_', '-')} is of {of} {' and '.join(methods)}", actual=f"--method {options.method}",
                fix="leave it out, or choose another method",
            )  # fmt: skip
    if options.group_size == 256 and options.method != TERNARY:
        raise ConfigError("--group-size 256 is of method ternary", actual=f"--method {options.method}")


def make_recipe(options: argparse.Namespace, dtype: DType) -> Recipe:
    """Return the recipe that the options ask for. Raises ConfigError for options that are invalid or contradictory."""
    if options.method != "rtn" and options.calibration is None:
        raise ConfigError(f"method {options.method} looks at activations", fix="give it text: --calibration FILE")
    if not 0 < options.damping < 1:
        raise ConfigError("--damping", expected="a number between 0 and 1", actual=options.damping)
    for name, value in (("windows", options.windows), ("window", options.window)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name}", expected="at least 1", actual=value)
    if options.skip_positions < 0:
        raise ConfigError("--skip-positions", expected="at least 0", actual=options.skip_positions)
    symmetric = not (options.asymmetric or options.format == "awq")
    min_zero = 0 if options.format == "awq" else 1
    search = options.method != "rtn" if options.search is None else options.search
    grid = GridSettings(options.group_size, symmetric, search, min_zero, dtype)
    order = GptqSettings(options.damping, options.act_order, options.static_groups)
    return Recipe(options.method, grid, order, options.skip_positions, options.lm_head)


def calibration_windows(options: argparse.Namespace, folder: ModelFolder) -> list[list[int]]:
    """Return the token ids of the calibration text, cut into windows."""
    tokenizer = Tokenizer.open(folder.path, vocab_size=folder.config.vocab_size)
    longest = folder.config.max_position_embeddings
    length = min(_WINDOW, longest) if options.window is None else options.window
    if length > longest:
        raise ConfigError("--window", expected=f"at most {longest}, the tokens that the model takes", actual=length)
    windows: list[list[int]] = token_windows(read_texts(options.calibration), tokenizer, options.windows, length)
    if options.skip_positions >= len(windows[0]):
        most = f"fewer than a window's {len(windows[0])}"
        raise ConfigError("--skip-positions", expected=most, actual=options.skip_positions)
    return windows


def run(options: argparse.Namespace) -> int:
    """Quantise the checkpoint. Raises CpmrtError, and leaves nothing of the new folder then."""
    check_options(options)
    check_new(options.out, "folder")
    folder = ModelFolder.open(options.model, weights=False)
    if options.method == TERNARY:
        folder.fetch_weights()
        write_ternary(folder, options.out, options.group_size)
        note(f"{options.out}: {format_bytes(_size(options.out))}")
        return 0
    recipe = make_recipe(options, folder.config.dtype or DType.BFLOAT16)
    quantiser = ModelQuantiser(folder, recipe, options.format, open_module(options.device))
    windows = calibration_windows(options, folder) if recipe.needs_calibration else []
    folder.fetch_weights()
    begun = time.perf_counter()

    def report(what: str, result: QuantisedLayer) -> None:
        errors = " ".join(f"{name.rpartition('.')[2]} {error:.1e}" for name, error in result.errors.items())
        note(f"{what}, {time.perf_counter() - begun:.0f} s  {errors}".rstrip())

    quantiser.write(options.out, windows, report)
    calibrated = f"; calibrated on {sum(map(len, windows))} tokens" if windows else ""
    note(f"{options.out}: {format_bytes(_size(options.out))}{calibrated}")
    return 0


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
