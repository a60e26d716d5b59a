"""Compile the CUDA kernels of a model ahead of time, so that a later start compiles none. Needs NVRTC, but no GPU.

MODEL is a folder or a hub id, --shape a well-known shape; without either it is every such shape and the bundled model.
The kernels are those of a start with the same options; every shape but minicpm-sala-9b, and the bundled model, have the
drafts eagle2 and eagle3. For another machine: name its architecture, compile with CPMRT_CACHE_DIR set, and copy that
folder. They also depend on the number of multiprocessors, which --sms gives.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Iterator

from cpmrt.bench.shapes import SHAPES
from cpmrt.cli import arguments as options
from cpmrt.cli import option_values
from cpmrt.cli.described_model import add_description_options, described_model
from cpmrt.cli.output import printable, write
from cpmrt.cli.parser import UsageError
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.build.launcher import Module
from cpmrt.cuda.build.modules import compile_all
from cpmrt.cuda.driver.device import Device, open_device
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, NoDeviceError
from cpmrt.opening import Blueprint


def configure(parser: argparse.ArgumentParser) -> None:
    options.add_model_source(parser, positional=True)
    parser.add_argument("--shape", choices=SHAPES, help="the kernels of this shape, instead of MODEL")
    parser.add_argument(
        "--arch", action="append", type=_architecture, metavar="SM",
        help="such as sm_87; may be repeated (default: this machine's GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--sms", type=option_values.integer(1, 1024), metavar="N",
        help="multiprocessors of that GPU (default: of the best known one)",
    )  # fmt: skip
    options.add_engine_options(
        parser, "dtype", "prefill_chunk", "max_sequences", "lm_head_bits", "lm_head_screen", "kv_dtype",
    )  # fmt: skip
    add_description_options(parser)


def run(args: argparse.Namespace) -> int:
    """Compile the modules that the cache lacks, for each --arch or for this GPU.

    Raises KernelCompileError, ConfigError if the cache cannot be written, NoDeviceError if there is neither --arch nor
    a GPU.
    """
    options.check_one_source(args, "compile")
    if args.sms and not args.arch:
        raise UsageError("--sms needs --arch; see cpmrt compile --help")
    settings = options.engine_config(args)
    for device in [known_device(arch, args.sms) for arch in args.arch or ()] or [_this_gpu()]:
        before, started = cubin_cache.cubins(), time.monotonic()
        wanted = _wanted(_models(args, settings, device), device, all_known=not (args.shape or args.model))
        paths = {path for dtype, modules in wanted for path in compile_all(device.arch, dtype, modules, must_last=True)}
        seconds = time.monotonic() - started
        write(
            f"{device.arch}, {device.num_sms} multiprocessors ({printable(device.name)}): "
            f"{len(paths)} modules, {len(paths - before.keys())} compiled now, {seconds:.1f} s\n"
        )
    write(f"in {cubin_cache.folder()}\n")
    return 0


def _models(args: argparse.Namespace, settings: EngineConfig, device: Device) -> Iterator[Blueprint]:
    def target(config: ModelConfig) -> CudaTarget:
        return CudaTarget(device)

    shapes = [args.shape] if args.shape else [] if args.model else list(SHAPES)
    for shape in shapes:
        yield described_model(args, settings, target, model=None, shape=shape)[1]
    if not args.shape:
        yield described_model(args, settings, target, model=args.model, shape=None)[1]


def _wanted(
    models: Iterable[Blueprint], device: Device, *, all_known: bool
) -> Iterator[tuple[DType, list[Module]]]:
    """Yield the modules to compile for each storage type, each module once.

    Where all known models are compiled, those that cannot run with these options (draft trees with a recurrent state)
    are left out.
    """
    wanted: dict[DType, dict[object, Module]] = {}
    for model in models:
        try:
            found = modules_of(model, device)
        except ConfigError as error:
            if not all_known:
                raise
            write(f"left out: {model.config.architecture}: {error}\n")
            continue
        for file, sizes in found:
            wanted.setdefault(model.dtype, {})[file, frozenset(sizes.items())] = file, sizes
    for dtype, modules in wanted.items():
        yield dtype, list(modules.values())


def _architecture(text: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}", text):
        raise argparse.ArgumentTypeError(f"expected an architecture such as sm_87, got {text!r}")
    return text


def _this_gpu() -> Device:
    try:
        return open_device()
    except NoDeviceError as error:
        fix = "name an architecture, as in: cpmrt compile --arch sm_87"
        raise NoDeviceError(error.what, expected=error.expected, actual=error.actual, fix=fix) from None
