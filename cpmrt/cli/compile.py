"""Compile the CUDA kernels ahead of time into the cache, where later starts find them. Needs NVRTC, but no GPU.

For another machine: compile for its architecture with CPMRT_CACHE_DIR set, and copy that folder.
"""

from __future__ import annotations

import argparse
import re
import time

from cpmrt.cli.output import write
from cpmrt.cuda import cubin_cache
from cpmrt.cuda.compiler import compile_all
from cpmrt.cuda.device import open_device
from cpmrt.cuda.kernels import constant_sets, files
from cpmrt.dtypes import DType
from cpmrt.errors import NoDeviceError

_DTYPES = {"bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--arch",
        action="append",
        type=_architecture,
        metavar="SM",
        help="such as sm_87; may be repeated (default: this machine's GPU)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="one storage type only (default: both)")


def run(args: argparse.Namespace) -> int:
    """Compile what the cache lacks. Raises KernelCompileError, or NoDeviceError without --arch and GPU."""
    dtypes = [_DTYPES[args.dtype]] if args.dtype else list(_DTYPES.values())
    modules = [(file, constants) for file in files() for constants in constant_sets(file)]
    for arch in args.arch or [_architecture_of_gpu()]:
        before, started = set(cubin_cache.folder().glob("*.cubin")), time.monotonic()
        paths = {path for dtype in dtypes for path in compile_all(arch, dtype, modules)}
        seconds = time.monotonic() - started
        write(f"{arch}: {len(paths)} modules, {len(paths - before)} compiled now, {seconds:.1f} s\n")
    write(f"in {cubin_cache.folder()}\n")
    return 0


def _architecture(text: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}[af]?", text):
        raise argparse.ArgumentTypeError(f"expected an architecture such as sm_87, got {text!r}")
    return text


def _architecture_of_gpu() -> str:
    try:
        return open_device().arch
    except NoDeviceError as error:
        fix = "name an architecture, as in: cpmrt compile --arch sm_87"
        raise NoDeviceError(error.what, expected=error.expected, actual=error.actual, fix=fix) from None
