"""Checks of `cpmrt doctor` for any machine: versions, packages, cache folder, bundled model, executor, kernels."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import cpmrt
from cpmrt.byte_sizes import format_bytes
from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.build.source import kernels_folder
from cpmrt.cuda.kernels import KERNELS, files
from cpmrt.env import cache_dir
from cpmrt.errors import CpmrtError, KernelCompileError, NoDeviceError
from cpmrt.installation import (
    EXTRAS,
    install_missing,
    missing_packages,
    package_of,
    pip_install,
    reinstall,
    required,
)
from cpmrt.models.decoder import tensor_specs
from cpmrt.text import Tokenizer
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.hub import BUNDLED
from cpmrt.weights.model_folder import ModelFolder

OLDEST_PYTHON = (3, 10)
_USES = {
    "server": "which cpmrt serve needs",
    "grammar": "which answers with a form (--json-schema, --regex, ...) need",
    "modelscope": "which models named modelscope:ORG/NAME need",
}
"""Extra -> the use that its packages have, as a clause of a finding."""


class Status(Enum):
    """The state of a finding: BROKEN keeps cpmrt from running, MISSING costs a part of it, UNUSED does no harm here."""

    OK = "ok"
    MISSING = "missing"
    UNUSED = "unused"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of `cpmrt doctor`: a subject, its state, what was found, and the command that mends it, if any."""

    subject: str
    status: Status
    found: str
    fix: str = ""


def versions() -> Iterator[Finding]:
    """Report cpmrt, Python, the platform, NumPy and its BLAS."""
    yield Finding("cpmrt", Status.OK, f"{cpmrt.__version__} in {Path(cpmrt.__file__).parent}")
    is_new_enough = sys.version_info >= OLDEST_PYTHON
    yield Finding(
        "Python",
        Status.OK if is_new_enough else Status.BROKEN,
        f"{platform.python_version()} ({sys.executable})",
        "" if is_new_enough else "install Python {}.{} or newer".format(*OLDEST_PYTHON),
    )
    yield Finding("platform", Status.OK, f"{platform.platform()}, {os.cpu_count()} CPU cores")
    yield Finding("NumPy", Status.OK, f"{np.__version__}, BLAS: {_blas()}")


def required_packages() -> Iterator[Finding]:
    """Report the packages without which cpmrt cannot run. An installed NumPy is left out, as `versions` reports it."""
    requirements = required()
    if not requirements:
        fix = pip_install("--editable", str(Path(cpmrt.__file__).parents[1]))
        yield Finding("required packages", Status.MISSING, "unknown: cpmrt runs from its sources, not installed", fix)
    for requirement in requirements:
        package = package_of(requirement)
        found = installed_version(package)
        if found is None:
            yield Finding(package, Status.BROKEN, "not installed", pip_install(requirement))
        elif package != "numpy":
            yield Finding(package, Status.OK, found)


def optional_packages() -> Iterator[Finding]:
    """Report the packages that only some uses need."""
    for extra, uses in _USES.items():
        absent = missing_packages(extra)
        if absent:
            what = f"{', '.join(absent)} not installed, {uses}"
            yield Finding(f"packages for {extra}", Status.UNUSED, what, install_missing(extra))
        else:
            found = ", ".join(f"{package} {installed_version(package)}" for package in EXTRAS[extra])
            yield Finding(f"packages for {extra}", Status.OK, found)


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder() -> Finding:
    """Report the folder that compiled kernels are cached in: its size, or that it cannot be written."""
    try:
        folder = cache_dir()
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return Finding("cache folder", Status.MISSING, str(error), "export CPMRT_CACHE_DIR=/tmp/cpmrt")
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fix = "export CPMRT_CACHE_DIR=/tmp/cpmrt (or another folder you can write)"
        return Finding("cache folder", Status.MISSING, f"{folder}: {existing} cannot be written", fix)
    state = format_bytes(size) if existing == folder else "not made yet"
    return Finding("cache folder", Status.OK, f"{folder}: {state}, writable")


def bundled_model() -> Finding:
    """Report whether the bundled model, which runs by default, is complete."""
    try:
        config = ModelFolder.open(None).config
        with Checkpoint.open(BUNDLED) as checkpoint:
            check(tensor_specs(config), checkpoint)
            size = format_bytes(checkpoint.num_bytes)
        Tokenizer.open(BUNDLED)
    except CpmrtError as error:
        root = BUNDLED.parents[2]
        is_checkout = (root / "pyproject.toml").exists()
        fix = f"git -C {root} checkout -- {BUNDLED.relative_to(root)}"
        return Finding(
            "bundled model",
            Status.MISSING,
            str(error),
            fix if is_checkout else reinstall(),
        )
    return Finding("bundled model", Status.OK, f"{config.architecture}, {size} of weights in {BUNDLED}")


def executor() -> Finding:
    """Report which executor runs a model here by default."""
    from cpmrt.cuda.driver.device import open_device

    try:
        device = open_device()
    except NoDeviceError as error:
        found = f"auto: NumPy, for the bundled model only; others need --executor reference ({error.what})"
        return Finding("executor", Status.OK, found)
    path = ", as on sm_80 to sm_89: CPMRT_PORTABLE is set" if device.is_portable else ""
    return Finding("executor", Status.OK, f"auto: CUDA on {device.name} ({device.arch}{path})")


def _blas() -> str:
    """Return the name and version of the BLAS as NumPy's build recorded them."""
    try:
        build: Any = np.show_config(mode="dicts")
        blas = build["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return "unknown"


def kernel_sources() -> Finding:
    """Report the folder that kernels are compiled from."""
    try:
        folder = kernels_folder()
    except KernelCompileError as error:
        return Finding("kernel sources", Status.MISSING, error.what, error.fix or "")
    absent = [file for file in files() if not (folder / file).is_file()]
    if absent:
        return Finding("kernel sources", Status.MISSING, f"{folder} lacks {', '.join(absent)}", reinstall())
    return Finding("kernel sources", Status.OK, f"{len(KERNELS)} kernels in {len(files())} files of {folder}")


def compiled_kernels() -> Finding:
    """Report the compiled kernels; that there are none is no fault."""
    sizes = cubin_cache.cubins().values()
    found = f"{len(sizes)} modules, {format_bytes(sum(sizes))}" if sizes else "none yet; `cpmrt compile` makes them"
    return Finding("compiled kernels", Status.OK, f"{found}, in {cubin_cache.folder()}")
