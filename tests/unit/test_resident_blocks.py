"""The number of multiprocessors that a process may use, and kernels whose blocks wait for each other."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cpmrt.cuda.build import launcher as launcher_module
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.occupancy import check_all_resident, multiprocessors
from cpmrt.cuda.kernels import KERNELS
from cpmrt.errors import DeviceError

OK, UNSUPPORTED = 0, 224


def driver_that_says(monkeypatch, *, affinity=None, resource=None, has_resources=True, blocks_per_sm=1):
    """Put a stand-in for the driver's bindings into sys.modules; where a value is None, the driver fails at that
    query."""

    def answer(value):
        return (OK, value) if value is not None else (UNSUPPORTED, None)

    limits = None if affinity is None else SimpleNamespace(param=SimpleNamespace(smCount=SimpleNamespace(val=affinity)))
    found = SimpleNamespace(
        CUexecAffinityType=SimpleNamespace(CU_EXEC_AFFINITY_TYPE_SM_COUNT=0),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16),
        cuCtxGetExecAffinity=lambda kind: answer(limits),
        cuCtxGetCurrent=lambda: (OK, "context"),
        cuCtxGetDevice=lambda: (OK, 0),
        cuDeviceGetAttribute=lambda attribute, device: (OK, 132),
        cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda kernel, block, shared: (OK, blocks_per_sm),
    )
    if has_resources:
        part = None if resource is None else SimpleNamespace(sm=SimpleNamespace(smCount=resource))
        found.CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
        found.cuCtxGetDevResource = lambda context, kind: answer(part)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=found))


@pytest.mark.parametrize(("said", "expected"), [
    ({}, 132), ({"affinity": 66}, 66), ({"affinity": 132, "resource": 16}, 16), ({"resource": 0}, 132),
    ({"affinity": 40, "has_resources": False}, 40), ({"has_resources": False}, 132),
])  # fmt: skip
def test_the_context_says_how_many_multiprocessors_there_are(monkeypatch, said, expected):
    driver_that_says(monkeypatch, **said)
    assert multiprocessors(132) == expected


def test_a_driver_that_does_not_know_the_question(monkeypatch):
    driver_that_says(monkeypatch, resource=16)
    driver = sys.modules["cuda.bindings"].driver

    def absent(*arguments):
        raise RuntimeError('Function "cuCtxGetDevResource" not found')

    driver.cuCtxGetDevResource = absent
    del driver.cuCtxGetExecAffinity
    assert multiprocessors(132) == 132


def test_blocks_that_wait_for_each_other_must_all_find_room(monkeypatch):
    kernel = SimpleNamespace(name="product_bf16", handle=1)
    driver_that_says(monkeypatch, affinity=64)
    check_all_resident(kernel, 64, 256, 1000)
    with pytest.raises(DeviceError) as caught:
        check_all_resident(kernel, 65, 256, 1000)
    for part in ("product_bf16", "65 blocks of 256 threads with 1000 bytes", "64 on 64 multiprocessors", "MPS"):
        assert part in str(caught.value)
    driver_that_says(monkeypatch, affinity=64, blocks_per_sm=2)
    check_all_resident(kernel, 128, 256, 1000)


def test_a_driver_that_fails_is_not_taken_for_a_device_without_room(monkeypatch):
    class CudaError(Exception):
        pass

    driver_that_says(monkeypatch, affinity=64)
    monkeypatch.setitem(sys.modules, "cupy.cuda.runtime", SimpleNamespace(CUDARuntimeError=CudaError))
    sys.modules["cuda.bindings"].driver.cuOccupancyMaxActiveBlocksPerMultiprocessor = lambda *arguments: (719, None)
    with pytest.raises(CudaError, match="719"):
        check_all_resident(SimpleNamespace(name="product_bf16", handle=1), 1, 256, 1000)


class Modules:
    """Stand-in for cpmrt's `Modules` that, like it, loads each kernel once."""

    kernels: dict[str, SimpleNamespace]

    def __init__(self):
        self.kernels = {}

    def kernel(self, spec, constants):
        allowed = SimpleNamespace(name=spec.name, handle=1, allow_shared_bytes=lambda size: None)
        return self.kernels.setdefault(f"{spec.name} {constants}", Kernel(allowed))


class Kernel:
    def __init__(self, found):
        self.name, self.handle, self.allow_shared_bytes = found.name, found.handle, found.allow_shared_bytes


def test_each_shape_is_looked_at_once_and_only_where_blocks_wait(monkeypatch):
    looked, launched = [], []
    monkeypatch.setattr(launcher_module, "check_all_resident", lambda kernel, *shape: looked.append(shape))
    monkeypatch.setattr(launcher_module, "launch", lambda *args, **options: launched.append(args))
    launch = Launcher(None, Modules(), use_pdl=True)
    plain, waiting = KernelSpec("plain", "k.cu"), KernelSpec("w", "k.cu", waits_across_blocks=lambda m: m["RUNS"] > 1)
    for grid in ((4, 2), (4, 2), 8):
        launch(plain, {"RUNS": 8}, grid, 256, smem=9)
        launch(waiting, {"RUNS": 8}, grid, 256, smem=9)
        launch(waiting, {"RUNS": 1}, grid, 256, smem=9)
    assert looked == [(8, 256, 9)] * 2 and len(launched) == 9


def test_which_kernels_wait_across_blocks():
    waiting = {spec.name: spec.waits_across_blocks for spec in KERNELS if spec.waits_across_blocks}
    assert all(waiting.pop(always)({}) for always in ("experts_row", "rescore", "row_layers"))
    assert set(waiting) == {f"linear_packed_{product}" for product in ("qkv", "residual", "gate_up", "head")}
    for wait in waiting.values():
        assert wait({"SHARED_RUN": 1, "RUNS": 8, "CLUSTERS": 0})
        for apart in ({"SHARED_RUN": 0}, {"RUNS": 1}, {"CLUSTERS": 1}):
            assert not wait({"SHARED_RUN": 1, "RUNS": 8, "CLUSTERS": 0} | apart)
