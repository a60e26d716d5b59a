"""Packing of kernel parameters as the driver reads them, and launches on a device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.driver.launch import Kernel, Parameters
from cpmrt.dtypes import DType
from cpmrt.errors import DeviceError


def test_the_driver_reads_each_parameter_at_its_own_width() -> None:
    array = SimpleNamespace(data=SimpleNamespace(ptr=0x7F00_DEAD_BEE0))
    parameters = Parameters((array, np.int32(-5), np.float32(1.5), np.uint64(1 << 63), None))
    pointers = (ctypes.c_void_p * 5).from_address(parameters.address)
    types = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
    read = [kind.from_address(pointer).value for kind, pointer in zip(types, pointers, strict=True)]
    assert read == [0x7F00_DEAD_BEE0, -5, 1.5, 1 << 63, 0]


def test_a_struct_takes_all_its_bytes() -> None:
    struct = bytes(range(128))
    parameters = Parameters((np.int32(1), np.void(struct), np.int32(2)))
    pointers = (ctypes.c_void_p * 3).from_address(parameters.address)
    assert ctypes.string_at(pointers[1], 128) == struct
    assert [ctypes.c_int32.from_address(pointers[i]).value for i in (0, 2)] == [1, 2]


@pytest.mark.parametrize("argument", [1, 1.0, True, "x"])
def test_a_bare_number_is_refused(argument: Any) -> None:
    with pytest.raises(TypeError, match="device arrays and NumPy scalars"):
        Parameters((argument,))


def test_attributes_of_shared_memory_are_set_once_and_only_when_needed() -> None:
    limits: list[int] = []

    class Raw:
        def __setattr__(self, name: str, value: int) -> None:
            limits.append(value)

    kernel = Kernel("k", 0, Raw(), has_pdl=True)
    for num_bytes in (0, 48 * 1024, 100_000, 100_000, 50_000, 200_000):
        kernel.allow_shared_bytes(num_bytes)
    assert limits == [100_000, 200_000]
    for _ in range(3):
        kernel.prefer_shared()
    assert limits == [100_000, 200_000, 100]


@pytest.mark.gpu
def test_the_driver_keeps_a_preference_for_shared_memory(cuda: Any) -> None:
    from cuda.bindings import driver

    from cpmrt.cuda.build.modules import Modules
    from cpmrt.cuda.driver.launch import launch
    from cpmrt.cuda.load.random import FILL_NORMAL

    kernel = Modules(cuda.arch, DType.BFLOAT16).kernel(FILL_NORMAL, {})
    out = cuda.array(np.zeros(8, np.float32), DType.BFLOAT16)
    scalars = (np.int64(8), np.uint64(7), np.float32(0.0), np.float32(1.0))
    launch(cuda.stream, kernel, 1, 32, 0, (out, *scalars), prefers_shared=True)
    cuda.sync()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    status, percent = driver.cuFuncGetAttribute(attribute, kernel.handle)
    assert (int(status), percent) == (0, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_launches_eager_and_captured_give_the_same(cuda: Any, pdl: bool) -> None:
    count = 1000
    fill = cuda.kernel("fill_normal", DType.BFLOAT16)
    eager, captured = (cuda.array(np.zeros(count, np.float32), DType.BFLOAT16) for _ in range(2))
    scalars = (np.int64(count), np.uint64(7), np.float32(0.0), np.float32(1.0))
    fill(4, 256, eager, *scalars, pdl=pdl)
    cuda.stream.begin_capture()
    fill(4, 256, captured, *scalars, pdl=pdl)
    fill(4, 256, captured, *scalars, pdl=pdl)
    graph = cuda.stream.end_capture()
    graph.launch(cuda.stream)
    np.testing.assert_array_equal(cuda.numpy(eager), cuda.numpy(captured))
    assert np.std(cuda.numpy(captured, DType.BFLOAT16)) > 0.5


@pytest.mark.gpu
def test_a_device_is_asked_what_finds_room(cuda: Any) -> None:
    from cpmrt.cuda.build.modules import Modules
    from cpmrt.cuda.driver.occupancy import check_all_resident, multiprocessors
    from cpmrt.cuda.load.random import FILL_NORMAL

    of_device = cuda.cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    assert 0 < cuda.device.num_sms == multiprocessors(of_device) <= of_device
    kernel = Modules(cuda.arch, DType.BFLOAT16).kernel(FILL_NORMAL, {})
    check_all_resident(kernel, cuda.device.num_sms, 1024, 0)
    with pytest.raises(DeviceError, match="fill_normal_bf16 wait for each other"):
        check_all_resident(kernel, 64 * cuda.device.num_sms, 1024, 0)
