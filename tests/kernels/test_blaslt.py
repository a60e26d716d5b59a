"""The ctypes binding of cuBLASLt: on a stand-in library that carries out what the descriptors say, and on a device."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.driver import blaslt
from cpmrt.cuda.driver.blaslt import CublasLt, CublasLtError
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.errors import DeviceError
from cpmrt.ops import OPS

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
STORED = {2: DType.FLOAT16, 14: DType.BFLOAT16}
NOT_SUPPORTED = 15


def contents(reference: Any) -> Any:
    """Return the object that a ctypes.byref() refers to."""
    return reference._obj


class StandIn:
    """A stand-in for cuBLASLt as documented, on host memory: column-major, layouts by handle. `alive` holds the handles
    that have not been destroyed."""

    def __init__(self, num_algorithms: int = 1, failing: str = ""):
        self.num_algorithms, self.failing = num_algorithms, failing
        self.alive: dict[int, Any] = {}
        self.preferences: dict[int, int] = {}
        self.searched: list[int] = []
        """The K of each product that algorithms were asked for."""
        for name in dir(type(self)):
            if name.startswith("cublasLt"):
                # ctypes functions take attributes such as argtypes; bound methods do not.
                setattr(self, name, self._function(getattr(self, name), name))

    def _function(self, method: Any, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            types = getattr(call, "argtypes", None)
            assert types is None or len(types) == len(arguments), name
            return NOT_SUPPORTED if name == f"cublasLt{self.failing}" else method(*arguments)

        return call

    def _new(self, out: Any, value: Any) -> int:
        contents(out).value = 1000 + len(self.alive)
        assert contents(out).value not in self.alive
        self.alive[contents(out).value] = value
        return 0

    def _drop(self, handle: Any) -> int:
        del self.alive[handle.value]
        return 0

    def cublasLtCreate(self, out: Any) -> int:
        return self._new(out, "handle")

    def cublasLtGetVersion(self) -> int:
        return 130100

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0), "float32 sums and scales"
        return self._new(out, {})

    def cublasLtMatmulDescSetAttribute(self, handle: Any, name: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(contents(value))
        self.alive[handle.value][name] = contents(value).value
        return 0

    def cublasLtMatrixLayoutCreate(self, out: Any, dtype: int, rows: int, columns: int, leading: int) -> int:
        return self._new(out, (STORED[dtype], rows, columns, leading))

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:
        return self._new(out, "preference")

    def cublasLtMatmulPreferenceSetAttribute(self, handle: Any, name: int, value: Any, size: int) -> int:
        assert self.alive[handle.value] == "preference" and size == ctypes.sizeof(contents(value))
        self.preferences[name] = contents(value).value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        _, _, w_layout, *_, requested, results, count = arguments
        self.searched.append(self.alive[w_layout.value][1])
        contents(count).value = min(self.num_algorithms, requested)
        for number in range(contents(count).value):
            results[number].words[0] = 77 + number
        return 0

    cublasLtDestroy = cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = _drop

    def cublasLtMatmul(self, *arguments: Any) -> int:
        _, operation, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, *_ = arguments
        assert self.alive[operation.value] == {3: 1} and c == d and c_layout is d_layout
        out = self._matrix(d, d_layout)
        product = self._values(a, a_layout).T @ self._values(b, b_layout)
        scale, keep = (ctypes.c_float.from_address(address).value for address in (alpha, beta))
        sums = np.float32(scale) * product + (np.float32(keep) * self._values(c, c_layout) if keep else 0)
        out[:] = from_float32(sums.astype(np.float32), self.alive[d_layout.value][0])
        return 0

    def cublasLtGetStatusString(self, status: int) -> bytes:
        return b"CUBLAS_STATUS_NOT_SUPPORTED" if status == NOT_SUPPORTED else b"?"

    def _matrix(self, address: int, layout: Any) -> Any:
        dtype, rows, columns, leading = self.alive[layout.value]
        words = np.frombuffer((ctypes.c_uint8 * (leading * columns * 2)).from_address(address), dtype.storage)
        return words.reshape(columns, leading).T[:rows]

    def _values(self, address: int, layout: Any) -> Any:
        return to_float32(self._matrix(address, layout), self.alive[layout.value][0])


def aligned(values: Any, dtype: DType) -> Any:
    """Return `values` as storage words of `dtype` at an address that is a multiple of 64."""
    words = from_float32(np.asarray(values, np.float32), dtype)
    memory = np.zeros(words.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    view = memory[begin : begin + words.nbytes].view(dtype.storage).reshape(words.shape)
    view[:] = words
    return view


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_descriptors_mean_the_product_of_rows(dtype: DType) -> None:
    random = np.random.default_rng(0)
    x, w, y = (aligned(random.standard_normal(shape), dtype) for shape in ((5, 64), (48, 64), (5, 48)))
    before = to_float32(y.copy(), dtype)
    with CublasLt(0, 1 << 20, StandIn()) as lt:
        plan = lt.plan(5, 48, 64, dtype)
        addresses = (y.ctypes.data, x.ctypes.data, w.ctypes.data)
        product = to_float32(x, dtype) @ to_float32(w, dtype).T
        lt.matmul(plan, *addresses, 0, alpha=0.25, beta=1.0)
        assert np.allclose(to_float32(y, dtype), round_to(np.float32(0.25) * product + before, dtype), rtol=1e-2)
        y[:] = 0x7FFF if dtype is DType.BFLOAT16 else np.nan
        lt.matmul(plan, *addresses, 0)
        assert np.allclose(to_float32(y, dtype), round_to(product, dtype), rtol=1e-2)


def test_a_result_may_be_columns_of_a_wider_matrix() -> None:
    random = np.random.default_rng(1)
    x, w, y = (aligned(random.standard_normal(shape), DType.FLOAT16) for shape in ((5, 64), (48, 64), (5, 80)))
    before = y.copy()
    with CublasLt(0, 1 << 20, StandIn()) as lt:
        plan = lt.plan(5, 48, 64, DType.FLOAT16, 80)
        lt.matmul(plan, y.ctypes.data + 32, x.ctypes.data, w.ctypes.data, 0)
    product = to_float32(x, DType.FLOAT16) @ to_float32(w, DType.FLOAT16).T
    assert np.allclose(y[:, 16:64], product, rtol=1e-2, atol=1e-2)
    assert np.array_equal(y[:, :16], before[:, :16]) and np.array_equal(y[:, 64:], before[:, 64:])


def test_making_the_library_ready_asks_it_for_algorithms_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandIn()
    monkeypatch.setattr(blaslt, "load_library", lambda: library)
    blaslt.make_ready()
    assert library.searched == [1024, 4096] and not library.alive


def test_a_shape_is_planned_once_and_everything_is_destroyed() -> None:
    library = StandIn()
    with CublasLt(0, 123 << 10, library) as lt:
        plan = lt.plan(100, 64, 128, DType.BFLOAT16)
        assert lt.plan(100, 64, 128, DType.BFLOAT16) is plan and library.searched == [128]
        assert lt.plan(100, 64, 128, DType.FLOAT16) is not plan
        assert plan.algorithm.words[0] == 77
        assert "preference" not in library.alive.values()
    assert not library.alive
    lt.close()


def test_only_algorithms_that_split_no_sum_are_asked_for() -> None:
    library = StandIn()
    with CublasLt(0, 123 << 10, library) as lt:
        lt.plan(100, 64, 128, DType.BFLOAT16)
    assert library.preferences == {1: 123 << 10, 3: 0, 5: 16, 6: 16, 7: 16, 8: 16}


def test_the_first_algorithm_that_is_taken() -> None:
    library = StandIn(num_algorithms=3)
    with CublasLt(0, 123 << 10, library) as lt:
        plan = lt.plan(100, 64, 128, DType.BFLOAT16, takes=lambda algorithm: algorithm.words[0] > 77)
        assert plan.algorithm.words[0] == 78
        with pytest.raises(CublasLtError, match="no algorithm for"):
            lt.plan(100, 64, 256, DType.BFLOAT16, takes=lambda _: False)
    assert not library.alive


def test_long_sums_are_asked_for_as_shorter_ones() -> None:
    library = StandIn()
    with CublasLt(0, 123 << 10, library) as lt:
        assert lt.plan(128, 4096, 16384, DType.BFLOAT16).inner == 16384
    assert library.searched == [4096] and not library.alive


@pytest.mark.parametrize("failing", ["Create", "MatrixLayoutCreate", "MatmulAlgoGetHeuristic"])
def test_a_failing_library_gives_its_reason_and_leaks_nothing(failing: str) -> None:
    library = StandIn(failing=failing)
    reason = f"cublasLt{failing} fails: CUBLAS_STATUS_NOT_SUPPORTED"
    with pytest.raises(CublasLtError, match=reason), CublasLt(0, 0, library) as lt:
        lt.plan(100, 64, 128, DType.BFLOAT16)
    assert not library.alive


def test_a_choice_that_fails_leaks_nothing() -> None:
    """A trial of an algorithm launches kernels, whose errors are not the library's."""

    def fails(algorithm: Any) -> bool:
        raise DeviceError("the GPU failed")

    library = StandIn()
    with CublasLt(0, 123 << 10, library) as lt:
        with pytest.raises(DeviceError):
            lt.plan(100, 64, 128, DType.BFLOAT16, takes=fails)
        assert list(library.alive.values()) == ["handle"]


def test_no_algorithm_is_a_reason_that_names_the_shape() -> None:
    reason = r"no algorithm for \[100, 128\] x \[64, 128\]\^T in bfloat16"
    with CublasLt(0, 0, StandIn(num_algorithms=0)) as lt, pytest.raises(CublasLtError, match=reason):
        lt.plan(100, 64, 128, DType.BFLOAT16)


def test_a_misaligned_operand_is_refused() -> None:
    with CublasLt(0, 0, StandIn()) as lt, pytest.raises(ValueError, match="aligned to 16 bytes"):
        lt.matmul(lt.plan(1, 16, 16, DType.BFLOAT16), 4096, 4096 + 8, 4096, 0)


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blaslt, "_SONAMES", ("libcublasLt-absent.so",))
    monkeypatch.setitem(__import__("sys").modules, "cuda.pathfinder", None)
    with pytest.raises(CublasLtError, match="not installed; pip install nvidia-cublas"):
        CublasLt(0, 0)


@pytest.fixture
def lt(cuda: Any) -> Any:
    """The cuBLASLt library on the device, with 32 MiB of workspace."""
    workspace = cuda.cupy.empty(32 << 20, np.uint8)
    with CublasLt(workspace.data.ptr, workspace.nbytes) as library:
        yield library
        cuda.sync()


def product_on(cuda: Any, lt: CublasLt, m: int, n: int, k: int, dtype: DType) -> tuple[Any, Any]:
    """Return 0.3 x w^T + y from the device and from NumPy; the guards of y must stay poison."""
    random = np.random.default_rng(m)
    x, w, y = (round_to(random.standard_normal(shape, np.float32), dtype) for shape in ((m, k), (n, k), (m, n)))
    buffer = np.full(m * n + 512, np.nan, np.float32)
    buffer[256:-256] = y.ravel()
    out, x_device, w_device = cuda.array(buffer, dtype), cuda.array(x, dtype), cuda.array(w, dtype)
    addresses = (out[256:].data.ptr, x_device.data.ptr, w_device.data.ptr)
    plan = lt.plan(m, n, k, dtype)
    lt.matmul(plan, *addresses, cuda.stream.ptr, alpha=0.3, beta=1.0)
    result = cuda.numpy(out, dtype)
    assert np.isnan(result[:256]).all() and np.isnan(result[-256:]).all()
    return result[256:-256].reshape(m, n), np.float32(0.3) * (x @ w.T) + y


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(65, 80, 128), (512, 1024, 2048), (129, 4096, 4096)], ids=str)
def test_products_on_the_device(cuda: Any, lt: CublasLt, shape: Any, dtype: DType) -> None:
    result, expected = product_on(cuda, lt, *shape, dtype)
    error = np.linalg.norm(result - expected) / np.linalg.norm(expected)
    assert error <= OPS["project_residual"].tolerance[dtype]


@pytest.mark.gpu
def test_a_captured_product_replays(cuda: Any, lt: CublasLt) -> None:
    dtype, (m, n, k) = DType.BFLOAT16, (200, 512, 1024)
    random = np.random.default_rng(2)
    x, w = (round_to(random.standard_normal(shape, np.float32), dtype) for shape in ((m, k), (n, k)))
    x_device, w_device = cuda.array(x, dtype), cuda.array(w, dtype)
    y = cuda.array(np.full((m, n), np.nan, np.float32), dtype)
    plan = lt.plan(m, n, k, dtype)
    cuda.stream.begin_capture()
    lt.matmul(plan, y.data.ptr, x_device.data.ptr, w_device.data.ptr, cuda.stream.ptr)
    graph = cuda.stream.end_capture()
    assert np.isnan(cuda.numpy(y, dtype)).all(), "ran during the capture"
    graph.launch(cuda.stream)
    first = cuda.numpy(y, dtype)
    graph.launch(cuda.stream)
    assert np.array_equal(cuda.numpy(y, dtype), first)
    assert np.linalg.norm(first - x @ w.T) / np.linalg.norm(x @ w.T) <= OPS["project_residual"].tolerance[dtype]
