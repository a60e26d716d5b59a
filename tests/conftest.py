"""What every test shares: the `gpu` marker, the `shared_data` folder and the hypothesis profile.

A module of GPU tests must skip in its tests or fixtures, not at import: CPMRT_REQUIRE_GPU=1 sees only the former.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("cpmrt", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("cpmrt")


@functools.cache
def missing_gpu() -> str:
    """Why there is no usable GPU, '' if there is one."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    error, count = libcuda.cuInit(0), ctypes.c_int(0)
    if error:
        return f"cuInit fails with CUDA error {error}"
    error = libcuda.cuDeviceGetCount(ctypes.byref(count))
    return "" if error == 0 and count.value else f"no CUDA device (cuDeviceGetCount: error {error})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a `gpu` test, visibly, where there is no GPU."""
    if item.get_closest_marker("gpu") and missing_gpu():
        pytest.skip(f"needs a GPU: {missing_gpu()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CPMRT_REQUIRE_GPU=1 a `gpu` test that skips, for whatever reason, has failed."""
    report = yield
    required = os.environ.get("CPMRT_REQUIRE_GPU") == "1" and item.get_closest_marker("gpu")
    if required and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped under CPMRT_REQUIRE_GPU=1: {reason}"
    return report


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real configs and tokenizers beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared data folder at {folder}")
    return folder


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpmrt finds no GPU, whatever this machine has."""
    from cpmrt.cuda import assembly
    from cpmrt.errors import NoDeviceError

    def absent() -> None:
        raise NoDeviceError("no NVIDIA driver (libcuda.so.1)", fix="use executor='reference'")

    monkeypatch.setattr(assembly, "open_device", absent)
