"""Fixtures and settings of all tests: the `gpu` marker, the shared data, a fresh compiler, the hypothesis profiles.

A module of GPU tests must skip in its tests or fixtures, not at import: CPMRT_REQUIRE_GPU=1 sees only the former.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# ModelScope's client looks for its cache folder once in a process; the tests must not write to the user's.
MODELSCOPE_CACHE = tempfile.TemporaryDirectory(prefix="modelscope-")
os.environ["MODELSCOPE_CACHE"] = MODELSCOPE_CACHE.name

# No test may fail because a machine is slow or because of what is drawn: the usual profile always draws the same.
settings.register_profile(
    "usual", deadline=None, max_examples=60, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
settings.register_profile(
    "long", settings.get_profile("usual"), max_examples=1200, derandomize=False, print_blob=True
)
settings.load_profile("usual")


def pytest_configure() -> None:
    """Restore Python's SIGINT handler, so that programs that tests interrupt do not inherit an ignored SIGINT.

    A shell ignores SIGINT for commands that it runs in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    MODELSCOPE_CACHE.cleanup()


@functools.cache
def missing_gpu() -> str:
    """Return why there is no usable GPU, or '' if there is one."""
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
    """Report a `gpu` test that skips, for whatever reason, as failed if CPMRT_REQUIRE_GPU=1."""
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
    """A setting in which cpmrt finds no GPU, whatever this machine has."""
    from cpmrt.cuda import assembly
    from cpmrt.errors import NoDeviceError

    def absent() -> None:
        raise NoDeviceError("no NVIDIA driver (libcuda.so.1)", fix="use executor='reference'")

    monkeypatch.setattr(assembly, "open_device", absent)


@pytest.fixture
def fresh_nvrtc() -> Iterator[None]:
    """Load the compiler once, then forget which one was found, before the test and after it.

    The bindings keep for ever the function by which they look for NVRTC. A test that takes NVRTC away must not be the
    first that imports them: they would keep that test's function, and no later one in the process would find NVRTC.
    """
    from cpmrt.cuda.build import nvrtc
    from cpmrt.cuda.build.source import KernelSource
    from cpmrt.errors import KernelCompileError

    def forget() -> None:
        for function in vars(nvrtc).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    with contextlib.suppress(KernelCompileError):  # a machine without NVRTC
        nvrtc.compile_cubin(KernelSource("nothing.cu", b"", {}), ["-arch=sm_90"])
    forget()
    yield
    forget()
