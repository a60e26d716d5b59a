"""What `cpmrt doctor` looks at on any machine: versions, packages, the cache folder, the bundled model."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import cpmrt
from cpmrt.cli.finding import Finding, Status, pip_install
from cpmrt.env import cache_dir
from cpmrt.errors import CpmrtError, NoDeviceError
from cpmrt.memory.plan import format_bytes
from cpmrt.models.decoder import tensor_specs
from cpmrt.text import Tokenizer
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import BUNDLED, ModelFolder

OLDEST_PYTHON = (3, 10)


def versions() -> Iterator[Finding]:
    """cpmrt, Python, the platform, NumPy and its BLAS."""
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
    """The packages that loading and text need."""
    for package in ("tokenizers", "huggingface_hub", "jinja2", "rich"):
        found = installed_version(package)
        if found is None:
            yield Finding(package, Status.BROKEN, "not installed", pip_install(package))
        else:
            yield Finding(package, Status.OK, found)


def installed_version(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder() -> Finding:
    """Where compiled kernels go: its size, or that it cannot be written."""
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
    """Whether the model that runs by default is there and whole."""
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
            fix if is_checkout else pip_install("--force-reinstall", "cpmrt"),
        )
    return Finding("bundled model", Status.OK, f"{config.architecture}, {size} of weights in {BUNDLED}")


def executor() -> Finding:
    """What runs a model here where nothing else is asked for."""
    from cpmrt.cuda.driver.device import open_device

    try:
        device = open_device()
    except NoDeviceError as error:
        found = f"auto: NumPy, for the bundled model only; others need --executor reference ({error.what})"
        return Finding("executor", Status.OK, found)
    path = ", as on sm_80 to sm_89: CPMRT_PORTABLE is set" if device.is_portable else ""
    return Finding("executor", Status.OK, f"auto: CUDA on {device.name} ({device.arch}{path})")


def _blas() -> str:
    """Its name and version as NumPy's build recorded them."""
    try:
        build: Any = np.show_config(mode="dicts")
        blas = build["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return "unknown"
