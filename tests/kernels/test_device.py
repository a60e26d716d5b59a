"""The machines that `open_device` refuses, and its errors. No GPU is touched: a stand-in answers for CuPy."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt.cli.host_probes import executor
from cpmrt.cuda.driver.device import open_device
from cpmrt.cuda.driver.faults import device_fault, device_faults
from cpmrt.errors import DeviceError, MemoryPlanError, NoDeviceError

H200 = {
    "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448, "totalGlobalMem": 141 << 30, "integrated": 0,
}  # fmt: skip


class CUDARuntimeError(RuntimeError):
    status = 999


class CUDADriverError(CUDARuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    """What CuPy's own pool of memory raises."""


def stand_in(monkeypatch: pytest.MonkeyPatch, *, driver: int = 13000, count: Any = 1, **properties: Any) -> None:
    """Put a cupy into sys.modules whose runtime has this driver and these GPUs."""

    def get_count() -> int:
        if isinstance(count, Exception):
            raise count
        return int(count)

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: 13020,
        getDeviceCount=get_count,
        setDevice=lambda index: None,
        getDeviceProperties=lambda index: {**H200, **properties},
    )
    driver_api = SimpleNamespace(CUDADriverError=CUDADriverError)
    memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda = SimpleNamespace(runtime=runtime, driver=driver_api, memory=memory)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))


def test_a_usable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    device = open_device()
    assert (device.arch, device.num_sms, device.name) == ("sm_90", 132, "NVIDIA H200")
    assert device.driver_version == (13, 0) and not device.is_unified


def test_a_unified_board_reports_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, integrated=1, major=8, minor=7)
    device = open_device()
    assert device.arch == "sm_87" and device.is_unified and device.free_bytes() > 0


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"driver": 0}, r"no NVIDIA driver \(libcuda\.so\.1\); install the driver"),
        ({"driver": 12080}, r"expected CUDA 13\.0 or newer, got CUDA 12\.8; .*cupy-cuda12x"),
        ({"driver": 11040}, r"expected CUDA 13\.0 or newer, got CUDA 11\.4; update the driver$"),
        ({"count": CUDARuntimeError("cudaErrorNoDevice: none")}, r"no GPU answers: got cudaErrorNoDevice.*nvidia-smi"),
        ({"count": CUDARuntimeError("cudaErrorUnknown: 999")}, r"no GPU answers: got cudaErrorUnknown"),
        ({"count": 0}, "this process sees no GPU; check CUDA_VISIBLE_DEVICES"),
        ({"major": 7, "minor": 5}, r"too old: expected compute capability 8\.0 .*, got 7\.5; use executor='reference'"),
    ],
)
def test_each_refusal_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], message: str
) -> None:
    stand_in(monkeypatch, **machine)
    with pytest.raises(NoDeviceError, match=message):
        open_device()


@pytest.mark.parametrize(("wish", "capability", "shared"), [(None, 90, 232448), ("0", 90, 232448), ("1", 86, 101376)])
def test_the_path_of_older_gpus_on_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, wish: str | None, capability: int, shared: int
) -> None:
    monkeypatch.delenv("CPMRT_PORTABLE", raising=False)
    if wish is not None:
        monkeypatch.setenv("CPMRT_PORTABLE", wish)
    stand_in(monkeypatch)
    device = open_device()
    assert (device.arch, device.capability, device.shared_bytes_per_block) == ("sm_90", capability, shared)
    assert device.is_portable == (wish == "1") == ("CPMRT_PORTABLE" in executor().found)


def test_an_older_gpu_is_on_its_own_path_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPMRT_PORTABLE", "1")
    stand_in(monkeypatch, major=8, minor=7, sharedMemPerBlockOptin=166912)
    device = open_device()
    assert (device.capability, device.shared_bytes_per_block, device.is_portable) == (87, 166912, False)


@pytest.mark.parametrize("kind", [CUDARuntimeError, CUDADriverError])
@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(2, MemoryPlanError, "less free memory.*nvidia-smi"), (700, DeviceError, "the GPU failed: .*make a new process")],
)
def test_errors_of_cupy_become_ours(
    monkeypatch: pytest.MonkeyPatch, kind: type[CUDARuntimeError], status: int, error: type[Exception], message: str
) -> None:
    stand_in(monkeypatch)
    fault = kind("cudaErrorSomething: words")
    fault.status = status
    with pytest.raises(error, match=message), device_faults():
        raise fault
    assert isinstance(device_fault(fault), error)


def test_a_lack_of_memory_in_cupys_pool_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    with pytest.raises(MemoryPlanError, match="less free memory.*got Out of memory: 64 bytes"), device_faults():
        raise OutOfMemoryError("Out of memory: 64 bytes")
    with pytest.raises(MemoryError, match="of the host"), device_faults():
        raise MemoryError("of the host")


def driver_library(monkeypatch: pytest.MonkeyPatch, *, is_there: bool) -> None:
    """Make loading libcuda succeed or fail."""

    def load(name: str) -> object:
        assert name == "libcuda.so.1"
        if is_there:
            return SimpleNamespace()
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    driver_library(monkeypatch, is_there=True)
    with pytest.raises(NoDeviceError, match=r"CuPy cannot be imported .*pip install .*cupy-cuda13x"):
        open_device()


def test_without_the_bindings_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing cuda-bindings package is reported with the command that installs it: CuPy does not install it."""
    stand_in(monkeypatch)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
    with pytest.raises(NoDeviceError, match=r"bindings cannot be imported .*pip install .*cuda-bindings==13"):
        open_device()


def test_without_a_driver_cupy_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    driver_library(monkeypatch, is_there=False)
    with pytest.raises(NoDeviceError, match=r"^no NVIDIA driver \(libcuda\.so\.1\); install the driver"):
        open_device()
    assert "(no NVIDIA driver (libcuda.so.1))" in executor().found


def test_an_unwritable_home_does_not_keep_cupy_from_importing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    written = (tmp_path / "cupy.py").write_text("raise ImportError('stop here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    driver_library(monkeypatch, is_there=True)
    with pytest.raises(NoDeviceError, match="stop here"):
        open_device()
    assert written and os.access(os.environ["CUPY_CACHE_DIR"], os.W_OK)
