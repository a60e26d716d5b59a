"""Compiles what GPU tests need on a machine without a GPU, so that a GPU machine spends its time on testing.

    tools/gpu_test_kernels.py --folder build/kernels                      # all GPU tests, for H100 and H200
    tools/gpu_test_kernels.py --folder build/kernels tests/executors      # those of some files or folders
    CPMRT_CACHE_DIR=build/kernels python3 tools/gpu_tests.py              # there, with the folder copied

A test runs with stand-ins for CuPy, for launches and for models on a GPU, as far as it comes: nothing computes, so it
fails or is skipped where it looks at results. What it has asked for by then is compiled. The rest, such as the kernels
of a second model in one test, the GPU machine compiles itself.

A cubin is found by the NVRTC version in its name. Where the other machine has another NVRTC, `--compiler 13.0.88` puts
that version there: cubins of one major version of CUDA run with every driver of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import io
import os
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cpmrt.cores import usable_cores  # noqa: E402
from cpmrt.cuda.build import modules, nvrtc  # noqa: E402
from cpmrt.cuda.build.spec import macros_of  # noqa: E402
from cpmrt.dtypes import DType  # noqa: E402

SECONDS_OF_A_TEST = 10
Found = set[tuple[str, tuple[tuple[str, int], ...], str]]
"""Modules to compile: each a kernel file, its constants, and the name of the storage type."""


class NumpyAsCupy(types.ModuleType):
    """A stand-in for the module `cupy`, whose arrays and functions are NumPy's."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np, name)


class Stream:
    """A stand-in for CuPy's stream, on which nothing runs."""

    ptr = 0

    def __init__(self, *_: object, **__: object):
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


def stand_in_for_cupy() -> None:
    """Replace CuPy by NumPy in this process."""
    cupy, cuda, runtime = NumpyAsCupy("cupy"), types.ModuleType("cupy.cuda"), types.ModuleType("cupy.cuda.runtime")
    runtime.CUDARuntimeError = type("CUDARuntimeError", (Exception,), {})  # type: ignore[attr-defined]
    cuda.runtime, cuda.Stream = runtime, Stream  # type: ignore[attr-defined]
    cupy.cuda, cupy.ndarray = cuda, np.ndarray  # type: ignore[attr-defined]
    cupy.asnumpy = lambda array, **_: np.asarray(array)  # type: ignore[attr-defined]
    for module in (cupy, cuda, runtime):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module


class Recorder:
    """A pytest plug-in that lets GPU tests run without a GPU, and records the modules that they want compiled."""

    def __init__(self, arch: str):
        self.found: Found = set()
        self._arch = arch

    def note(self, file: str, constants: Any, dtype: DType) -> None:
        """Record one module."""
        sizes = tuple(sorted((name, int(value)) for name, value in macros_of(constants).items()))
        self.found.add((file, sizes, dtype.name))

    def pytest_sessionstart(self) -> None:
        """Replace the device, its kernels and its executor by stand-ins that record modules."""
        from cpmrt import executor_choice, llm
        from cpmrt.cuda import assembly, precompile
        from cpmrt.cuda.build import launcher
        from cpmrt.cuda.driver import device, launch
        from cpmrt.opening import open_blueprint

        known = precompile.known_device(self._arch)

        def open_executor(folder: Any, settings: Any) -> None:
            with open_blueprint(folder, settings, assembly.CudaTarget(known)) as blueprint:
                for file, constants in precompile.modules_of(blueprint, known):
                    self.note(file, constants, blueprint.dtype)
            pytest.skip("its modules are noted")

        def kernel(of: modules.Modules, spec: Any, constants: Any) -> Any:
            self.note(spec.file, constants, of.dtype)
            return types.SimpleNamespace(allow_shared_bytes=lambda size: None, prefer_shared=lambda: None)

        def compile_several(of: modules.Modules, wanted: Any) -> None:
            for file, constants in wanted:
                self.note(file, constants, of.dtype)

        targets: list[tuple[Any, dict[str, Any]]] = [
            (executor_choice, {"begin_device": lambda settings: None}), (llm, {"begin_device": lambda settings: None}),
            (assembly, {"open_executor": open_executor, "open_device": lambda: known}),
            (device, {"open_device": lambda: known}),
            (modules.Modules, {"kernel": kernel, "compile": compile_several}),
            (launch, {"launch": lambda *_, **__: None}),
            (launcher, {"launch": lambda *_, **__: None, "check_all_resident": lambda *_: None}),
        ]  # fmt: skip
        for target, names in targets:
            for name, value in names.items():
                setattr(target, name, value)

    def pytest_collection_modifyitems(self, config: pytest.Config) -> None:
        """Keep `tests/conftest.py` from skipping tests for want of a GPU."""
        for plugin in config.pluginmanager.get_plugins():
            if hasattr(plugin, "missing_gpu"):
                plugin.missing_gpu = lambda: ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Stop a test after SECONDS_OF_A_TEST: without a GPU it may wait for ever."""
        signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_A_TEST)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _time_is_up(*_: object) -> None:
    raise TimeoutError("a test without a GPU waits")


def modules_of(file: str, arch: str) -> Found:
    """Return the modules that the GPU tests of a file want. Needs a process of its own, as the stand-ins stay in it."""
    stand_in_for_cupy()
    signal.signal(signal.SIGALRM, _time_is_up)
    recorder = Recorder(arch)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-m", "gpu", file], plugins=[recorder])
    return recorder.found


def test_files(names: Sequence[str]) -> list[str]:
    """Return the files with GPU tests among these files and folders (default: those of kernels and executors)."""
    paths = [Path(name) for name in names or (ROOT / "tests" / "kernels", ROOT / "tests" / "executors")]
    files = [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else (path,))]
    return [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]


def record(files: Sequence[str], arch: str, workers: int) -> Found:
    """Return the modules that the GPU tests of all files want, each file run in a process of its own."""
    found: Found = set()
    with get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        for of_file in pool.imap_unordered(partial(modules_of, arch=arch), files):
            found |= of_file
    return found


def compiled(module: tuple[str, tuple[tuple[str, int], ...], str], arch: str) -> Path:
    """Compile one module, unless the cache has it, and return the path of its cubin."""
    file, sizes, dtype = module
    return modules.compile_module(file, arch, DType[dtype], dict(sizes))


def compile_found(found: Found, arch: str, workers: int, compiler: str | None) -> int:
    """Compile modules into the cache, and return their number.

    If another compiler's version is given, the names of the cubins get that version.
    """
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        paths = list(pool.map(partial(compiled, arch=arch), sorted(found), chunksize=8))
    for path in paths if compiler else ():
        path.rename(path.with_name(path.name.replace(f".{nvrtc.version()}.", f".{compiler}.")))
    return len(paths)


def main(arguments: Sequence[str]) -> int:
    """Parse the options, record the modules and compile them. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="the cache to fill; without it the modules are only counted")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--compiler", metavar="VERSION", help="NVRTC of the machine that runs the tests, if another")
    parser.add_argument("--workers", type=int, default=usable_cores(), metavar="N")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args(arguments)
    found = record(test_files(args.files), args.arch, args.workers)
    print(f"{len(found)} modules of {len({file for file, *_ in found})} sources", flush=True)
    if args.folder is not None:
        os.environ["CPMRT_CACHE_DIR"] = str(args.folder.resolve())
        print(f"{compile_found(found, args.arch, args.workers, args.compiler)} cubins in {args.folder}")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
