"""What `cpmrt doctor` looks at for the CUDA kernels: their sources, and what is compiled already."""

from __future__ import annotations

import sys

from cpmrt.cli.finding import Finding, Status
from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.build.source import kernels_folder
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.errors import KernelCompileError
from cpmrt.memory.plan import format_bytes


def sources() -> Finding:
    """The folder that kernels are compiled from."""
    try:
        folder = kernels_folder()
    except KernelCompileError as error:
        return Finding("kernel sources", Status.MISSING, error.what, error.fix or "")
    absent = [file for file in files() if not (folder / file).is_file()]
    if absent:
        fix = f"{sys.executable} -m pip install --force-reinstall --no-deps cpmrt"
        return Finding("kernel sources", Status.MISSING, f"{folder} lacks {', '.join(absent)}", fix)
    return Finding("kernel sources", Status.OK, f"{len(KERNELS)} kernels in {len(files())} files of {folder}")


def cubins() -> Finding:
    """The compiled kernels; that there are none is no fault."""
    sizes = [path.stat().st_size for path in cubin_cache.folder().glob("*.cubin")]
    found = f"{len(sizes)} modules, {format_bytes(sum(sizes))}" if sizes else "none yet; `cpmrt compile` makes them"
    return Finding("compiled kernels", Status.OK, f"{found}, in {cubin_cache.folder()}")
