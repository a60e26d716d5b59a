"""Failures around the CUDA executor give one clear error, give all memory back, and the next model runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from executors.cuda_models import BASE, ROWS, all_comes_back, free_bytes, write_model

from cpmrt import LLM, SamplingParams, env
from cpmrt.cuda.build import cubin_cache, nvrtc
from cpmrt.cuda.driver.blaslt import Algorithm, CublasLt, MatmulPlan
from cpmrt.cuda.ops import gemm_trial
from cpmrt.cuda.ops.gemm_trial import GemmTrial
from cpmrt.errors import (
    ClosedError,
    ContextLengthError,
    DeviceError,
    KernelCompileError,
    MemoryPlanError,
    NoDeviceError,
)

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROOT = Path(__file__).resolve().parents[2]
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), BASE | ROWS["qwen2"])


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[int, ...]:
    """The model's answer; it is made first, so that memory that stays allocated is there before the tests measure."""
    return answer(folder)


def answer(folder: Path, **settings: Any) -> tuple[int, ...]:
    with LLM(folder, executor="cuda", **settings) as llm:
        return llm.generate([5, 6, 7], GREEDY).token_ids


def test_closing_in_the_middle_frees_everything(
    folder: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with all_comes_back(monkeypatch):
        llm = LLM(folder, executor="cuda", max_sequences=2)
        for prompt in ([5, 6, 7], [8, 9]):
            next(llm.stream(prompt, SamplingParams(max_new_tokens=500, ignore_eos=True)))
        llm.close()
        llm.close()
        with pytest.raises(ClosedError, match="closed"):
            llm.generate([5])
        with pytest.raises(ClosedError, match="closed"):
            llm.logits([5])
        del llm
    assert answer(folder) == expected


def test_a_full_context_is_refused_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with all_comes_back(monkeypatch), LLM(folder, executor="cuda", max_context=70) as llm:
        prompt = list(range(3, 43))
        whole = llm.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert len(whole.token_ids) == 30
        with pytest.raises(ContextLengthError, match="at most 70 tokens, got 40 prompt \\+ 31 new; ask for at most 30"):
            llm.generate(prompt, SamplingParams(max_new_tokens=31, ignore_eos=True))
        with pytest.raises(ContextLengthError, match="at most 70 tokens, got 71"):
            llm.logits([5] * 71)
        assert llm.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True)).token_ids == whole.token_ids


def test_the_next_start_tries_no_algorithm_of_the_library(
    folder: Path, expected: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start takes the algorithms that the first one found equal, and gives the same bits."""
    shutil.copytree(env.cache_dir() / "cubins", tmp_path / "cubins", ignore=shutil.ignore_patterns("*.verdict"))
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
    tried, try_one, taken, take = list[bytes](), GemmTrial._is_equal, list[tuple[Any, bytes]](), CublasLt._choose

    def is_equal(trial: GemmTrial, library: CublasLt, algorithm: Algorithm) -> bool:
        tried.append(bytes(algorithm.words))
        return try_one(trial, library, algorithm)

    def choose(library: CublasLt, plan: MatmulPlan, takes: Callable[[Algorithm], bool]) -> Algorithm:
        algorithm = take(library, plan, takes)
        taken.append(((plan.num_rows, plan.columns, plan.inner), bytes(algorithm.words)))
        return algorithm

    monkeypatch.setattr(GemmTrial, "_is_equal", is_equal)
    monkeypatch.setattr(CublasLt, "_choose", choose)
    assert answer(folder, prefill_chunk=512) == expected
    kept = sorted(path.name for path in (tmp_path / "cubins").glob("*.verdict"))
    if not kept:
        pytest.skip("cuBLASLt is not used here")
    of_trial = gemm_trial.ROWS, gemm_trial.COLUMNS, gemm_trial.INNER
    chosen = [one for one in taken if one[0] != of_trial]
    assert chosen and len(set(tried)) == len(tried) >= len(kept)
    tried.clear()
    taken.clear()
    assert answer(folder, prefill_chunk=512) == expected
    assert tried == [] and taken == chosen
    assert sorted(path.name for path in (tmp_path / "cubins").glob("*.verdict")) == kept


LARGE = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 1 << 24}
PER_TOKEN = 2 * 2 * 32 * 128 * 2
"""Bytes of keys and values of one token."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large"), BASE | ROWS["llama"] | LARGE)


def test_more_than_the_device_has_is_refused(
    large: Path, folder: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = int(1.2 * free_bytes()) // PER_TOKEN
    with all_comes_back(monkeypatch):
        with pytest.raises(MemoryPlanError, match="does not fit .*max_context"):
            LLM(large, executor="cuda", max_context=context)
        # The allocation itself fails if the memory budget is more than the device has.
        with pytest.raises(MemoryPlanError, match="less free memory than was planned for.*end what else"):
            LLM(large, executor="cuda", max_context=context, memory_budget=1 << 50)
    assert answer(folder) == expected


HOLD = """
import sys, cupy
free = cupy.cuda.runtime.memGetInfo()[0]
held = cupy.cuda.Memory(free - (2 << 30))
print("held", flush=True)
sys.stdin.read()
"""


def test_beside_a_process_that_holds_the_memory(
    large: Path, folder: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        context = (4 << 30) // PER_TOKEN
        with all_comes_back(monkeypatch):
            with pytest.raises(MemoryPlanError, match="does not fit"):
                LLM(large, executor="cuda", max_context=context)
            with pytest.raises(MemoryPlanError, match="less free memory than was planned for"):
                LLM(large, executor="cuda", max_context=context, memory_budget=1 << 50)
            assert answer(folder) == expected
    finally:
        other.communicate()
    assert other.returncode == 0


def no_library(patch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    load = pathfinder.load_nvidia_dynamic_lib

    def not_found(name: str) -> Any:
        if name == "nvrtc":
            raise pathfinder.DynamicLibNotFoundError(f"no lib{name}")
        return load(name)

    patch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)


def no_headers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nvrtc, "header_folders", lambda: iter(()))


@pytest.mark.parametrize(("missing", "message"), [
    (no_library, "NVRTC is not installed.*pip install"),
    (no_headers, "no CUDA headers of the compiler's version.*pip install"),
])  # fmt: skip
def test_without_a_compiler(
    folder: Path,
    expected: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_nvrtc: None,
    missing: Callable[[pytest.MonkeyPatch], None],
    message: str,
) -> None:
    """Without a compiler cached kernels still run; other ones give an error that says what is missing.

    `fresh_nvrtc` has loaded NVRTC before it is hidden here.
    """
    with all_comes_back(monkeypatch), monkeypatch.context() as patch:
        missing(patch)
        assert answer(folder) == expected, "compiled kernels need no compiler"
        patch.setenv("CPMRT_CACHE_DIR", str(tmp_path))
        with pytest.raises(KernelCompileError, match=message):
            LLM(folder, executor="cuda")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: tuple[int, ...]) -> list[Path]:
    """A list that fills with the cubins that are taken from a copy of the cache."""
    shutil.copytree(env.cache_dir() / "cubins", tmp_path / "cache" / "cubins")
    monkeypatch.setenv("CPMRT_CACHE_DIR", str(tmp_path / "cache"))
    taken: list[Path] = []
    find = cubin_cache.find

    def finding(key: str, compiler: str | None, kind: str = cubin_cache.CUBIN) -> Path | None:
        path = find(key, compiler, kind)
        if path and kind == cubin_cache.CUBIN:
            taken.append(path)
        return path

    monkeypatch.setattr(cubin_cache, "find", finding)
    return taken


def test_damaged_cubins_are_built_again(folder: Path, expected: tuple[int, ...], own_cache: list[Path]) -> None:
    answer(folder)
    damaged, contents = own_cache[:3], [path.read_bytes() for path in own_cache[:3]]
    damaged[0].write_bytes(contents[0][:100])
    damaged[1].write_bytes(bytes(len(contents[1])))
    damaged[2].write_bytes(b"")
    assert answer(folder) == expected
    rebuilt = [sorted(path.parent.glob(f"{path.name.split('.')[0]}.*")) for path in damaged]
    assert all(len(found) == 1 and found[0].read_bytes().startswith(b"\x7fELF") for found in rebuilt)


def test_a_cubin_that_is_none_is_named(
    folder: Path, expected: tuple[int, ...], own_cache: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(folder)
    path, garbage = own_cache[0], b"not a cubin" * 99
    *start, _, suffix = path.name.split(".")
    path.unlink()
    named = ".".join([*start, hashlib.sha256(garbage).hexdigest()[:32], suffix])
    (path.parent / named).write_bytes(garbage)
    with all_comes_back(monkeypatch), pytest.raises(KernelCompileError, match="does not load for sm_.*delete the comp"):
        LLM(folder, executor="cuda")


@pytest.mark.parametrize(("machine", "message"), [
    ({"driverGetVersion": lambda: 0}, "no NVIDIA driver"),
    ({"driverGetVersion": lambda: 11080}, "driver is too old"),
    ({"getDeviceCount": lambda: 0}, "this process sees no GPU"),
    ({"getDeviceProperties": lambda index: {"major": 7, "minor": 5, "name": b"Tesla T4"}}, "Tesla T4 is too old"),
])  # fmt: skip
def test_a_machine_that_cannot_run_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], message: str
) -> None:
    from cupy.cuda import runtime

    with all_comes_back(monkeypatch), monkeypatch.context() as patch:
        for name, function in machine.items():
            patch.setattr(runtime, name, function)
        with pytest.raises(NoDeviceError, match=message):
            LLM(folder, executor="cuda")
        with pytest.raises(NoDeviceError, match="executor='reference'"):
            LLM(folder)


FAULT = """
import sys
import cupy, numpy
from cpmrt import LLM, SamplingParams
from cpmrt.errors import CpmrtError

def told(action):
    try:
        action()
        print("nothing was raised")
    except CpmrtError as error:
        print(f"{type(error).__name__}: {error}")

llm = LLM(executor="cuda", max_sequences=2, max_context=2048, cuda_graphs=sys.argv[1] == "graphs")
params = SamplingParams(max_new_tokens=2000, ignore_eos=True)
streams = [llm.stream([1, 5, 6, 7], params), llm.stream([1, 8, 9], params)]
for stream in streams:
    next(stream)
wild = cupy.RawKernel('extern "C" __global__ void wild(int* to) { *to = 1; }', "wild")
wild((1,), (1,), (numpy.uint64(64),))
for stream in streams:
    told(lambda: list(stream))
told(lambda: llm.generate([1, 5], params))
told(lambda: llm.logits([1, 5]))
llm.close()
told(lambda: LLM(executor="cuda", max_context=2048))
print("closed", *(stream.completion.finish_reason for stream in streams), flush=True)
"""


@pytest.mark.parametrize("mode", ["graphs", "eager"])
def test_a_fault_in_the_middle_ends_every_request(folder: Path, expected: tuple[int, ...], mode: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FAULT, mode]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    lines = run.stdout.splitlines()
    assert len(lines) == 6 and run.returncode == 0, (run.stdout, run.stderr)
    assert all(line.startswith("DeviceError: ") for line in lines[:4]), lines
    assert lines[4].startswith(("DeviceError: ", "NoDeviceError: "))
    assert lines[5] == "closed cancelled cancelled"
    assert answer(folder) == expected, "another process is not concerned"


def test_the_error_of_a_fault_is_a_device_error() -> None:
    from cupy.cuda import driver, runtime

    from cpmrt.cuda.driver.faults import device_fault

    assert isinstance(device_fault(runtime.CUDARuntimeError(700)), DeviceError)
    assert isinstance(device_fault(driver.CUDADriverError(719)), DeviceError)
    assert isinstance(device_fault(runtime.CUDARuntimeError(2)), MemoryPlanError)
