"""Dense products through cuBLASLt by ctypes, in or out of a stream capture (cupy refuses cuBLAS inside one).

Y[M, N] = alpha * X[M, K] W[N, K]^T + beta * Y, row-major. cuBLASLt is column-major: in its eyes Y is D (N x M), W is
A (K x N) taken transposed and X is B (K x M), each without a copy. Constants are those of cublasLt.h and
library_types.h (https://docs.nvidia.com/cuda/cublas/#cublaslt-datatypes-reference).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field, replace

from cpmrt.cuda.driver.captures import CAPTURES
from cpmrt.dtypes import DType
from cpmrt.errors import CpmrtError

_SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12", "/usr/local/cuda/lib64/libcublasLt.so")
_DATA_TYPE = {DType.FLOAT16: 2, DType.BFLOAT16: 14}
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSE_A, _TRANSPOSED = 3, 1
_MAX_WORKSPACE, _REDUCTION_MASK, _MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_NO_REDUCTION = 0
"""Allows no split of the sum over K: the split, and with it a row's bits, would depend on the number of rows."""
_ALIGNMENT = 16
_NUM_SUGGESTED = 8
_SUGGESTED_INNER = 4096
"""Algorithms are asked for as if a sum were no longer than this. For few rows and longer sums the library counts on
split sums, and without them suggests tiles that leave half of the device idle (measured: 80 us instead of 45 us)."""

_READY_WORKSPACE = 32 << 20


class CublasLtError(CpmrtError):
    """cuBLASLt is absent, does not work here, or has no algorithm for a shape. The message is the reason."""


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and the workspace that it needs."""

    _fields_ = (
        ("words", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(eq=False)
class MatmulPlan:
    """A product of one shape: its descriptors, and the first algorithm suggested by the library that the caller takes.

    Rows of Y are `stride` elements apart. Another algorithm may be some percent faster alone, but a prefill runs at the
    power limit, where all take the same time.
    """

    num_rows: int
    columns: int
    inner: int
    dtype: DType
    stride: int
    algorithm: Algorithm = field(default_factory=Algorithm)
    operation: c_void_p = field(default_factory=c_void_p)
    w: c_void_p = field(default_factory=c_void_p)
    x: c_void_p = field(default_factory=c_void_p)
    y: c_void_p = field(default_factory=c_void_p)

    def using(self, algorithm: Algorithm) -> MatmulPlan:
        """Return a plan with another algorithm, which lives as long as this one."""
        return replace(self, algorithm=algorithm)


def load_library() -> ctypes.CDLL:
    """Load libcublasLt of the cuBLAS wheel, the toolkit or JetPack. Raises CublasLtError."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (ImportError, OSError, RuntimeError):  # RuntimeError: the search found nothing
        pass
    for name in _SONAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CublasLtError("cuBLASLt is not installed", fix="pip install nvidia-cublas (CUDA 12: nvidia-cublas-cu12)")


def make_ready() -> None:
    """Make the library read the data by which it chooses algorithms, which it does once a process, for this context.

    The first choice takes it 0.1 s, and the first one for a long sum another 10 ms (measured on an H200 with cuBLASLt
    13). Raises CublasLtError.
    """
    with CublasLt(0, _READY_WORKSPACE) as library:
        for inner in (1024, _SUGGESTED_INNER):
            library.plan(64, 1024, inner, DType.BFLOAT16)


class CublasLt:
    """A cuBLASLt handle and the plans made with it, for one stream at a time, because the plans share the workspace.

    `workspace` is the device address of `workspace_bytes` bytes, 256-byte aligned. Needs a current CUDA context.
    `matmul` neither allocates nor waits, so it may be captured; `plan` comes before a capture. `close()` destroys
    everything; the plans are dead then.
    """

    def __init__(self, workspace: int, workspace_bytes: int, library: ctypes.CDLL | None = None):
        """Raises CublasLtError if the library is missing or does not work with this device and driver."""
        self._library = library or load_library()
        self._workspace, self._workspace_bytes = workspace, workspace_bytes
        self._plans: dict[tuple[int, int, int, DType, int], MatmulPlan] = {}
        self._handle = c_void_p()
        _declare(self._library)
        self._check("Create", ctypes.byref(self._handle))
        self.version: int = self._library.cublasLtGetVersion()

    def plan(
        self,
        num_rows: int,
        columns: int,
        inner: int,
        dtype: DType,
        stride: int | None = None,
        takes: Callable[[Algorithm], bool] = lambda _: True,
    ) -> MatmulPlan:
        """Return the plan for Y [num_rows, columns] and X [num_rows, inner], made once a shape.

        Y may be columns of a wider matrix, whose rows are `stride` elements apart. The algorithm is the first suggested
        one that `takes` is true for. Raises CublasLtError, also if there is none, and what `takes` raises.
        """
        key = (num_rows, columns, inner, dtype, stride or columns)
        if key not in self._plans:
            plan = MatmulPlan(*key)
            try:
                self._describe(plan)
                plan.algorithm = self._choose(plan, takes)
            except BaseException:  # `takes` may fail in its own ways
                self._destroy(plan)
                raise
            self._plans[key] = plan
        return self._plans[key]

    def matmul(
        self, plan: MatmulPlan, y: int, x: int, w: int, stream: int, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        """Enqueue y = alpha x w^T + beta y at these device addresses; y is not read if beta is 0.

        The library rounds the product before it adds y (measured on sm_90: its sums differ from those rounded once).
        `stream` is a raw handle. alpha and beta are read during the call and fixed in a capture.
        """
        if (y | x | w) % _ALIGNMENT:
            raise ValueError(f"operands of a product must be aligned to {_ALIGNMENT} bytes")
        scale, keep = c_float(alpha), c_float(beta)
        self._check(
            "Matmul", self._handle, plan.operation, ctypes.addressof(scale), w, plan.w, x, plan.x,
            ctypes.addressof(keep), y, plan.y, y, plan.y, ctypes.addressof(plan.algorithm),
            self._workspace, self._workspace_bytes, stream,
        )  # fmt: skip

    def close(self) -> None:
        """Destroy the plans and the handle, between captures. May be called again."""
        plans, self._plans = self._plans, {}
        for plan in plans.values():
            self._destroy(plan)
        handle, self._handle = self._handle, c_void_p()
        if handle:
            with CAPTURES:
                self._library.cublasLtDestroy(handle)

    def __enter__(self) -> CublasLt:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, function: str, *arguments: object) -> None:
        """Call `cublasLt<function>`. Raises CublasLtError."""
        status = getattr(self._library, f"cublasLt{function}")(*arguments)
        if status:
            reason = self._library.cublasLtGetStatusString(status).decode(errors="replace")
            raise CublasLtError(f"cublasLt{function} fails: {reason} (status {status})")

    def _describe(self, plan: MatmulPlan) -> None:
        self._check("MatmulDescCreate", ctypes.byref(plan.operation), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = c_int(_TRANSPOSED)
        self._check("MatmulDescSetAttribute", plan.operation, _TRANSPOSE_A, ctypes.byref(transposed), 4)
        for layout, rows, columns, leading in (
            (plan.w, plan.inner, plan.columns, plan.inner),
            (plan.x, plan.inner, plan.num_rows, plan.inner),
            (plan.y, plan.columns, plan.num_rows, plan.stride),
        ):
            self._check("MatrixLayoutCreate", ctypes.byref(layout), _DATA_TYPE[plan.dtype], rows, columns, leading)

    def _choose(self, plan: MatmulPlan, takes: Callable[[Algorithm], bool]) -> Algorithm:
        for algorithm in self._suggested(plan):
            if not algorithm.status and takes(algorithm):
                return algorithm
        raise CublasLtError(
            f"cuBLASLt has no algorithm for [{plan.num_rows}, {plan.inner}] x [{plan.columns}, {plan.inner}]^T "
            f"in {plan.dtype.label}"
        )

    def _suggested(self, plan: MatmulPlan) -> list[Algorithm]:
        """Ask for algorithms that take any 16-byte aligned operands and do not split the sum."""
        asked = MatmulPlan(plan.num_rows, plan.columns, min(plan.inner, _SUGGESTED_INNER), plan.dtype, plan.stride)
        found, count = (Algorithm * _NUM_SUGGESTED)(), c_int()
        try:
            self._describe(asked)
            with self._preference() as preference:
                self._check(
                    "MatmulAlgoGetHeuristic", self._handle, asked.operation, asked.w, asked.x, asked.y, asked.y,
                    preference, len(found), found, ctypes.byref(count),
                )  # fmt: skip
        finally:
            self._destroy(asked)
        return [Algorithm.from_buffer_copy(one) for one in found[: count.value]]

    @contextmanager
    def _preference(self) -> Iterator[c_void_p]:
        preference = c_void_p()
        self._check("MatmulPreferenceCreate", ctypes.byref(preference))
        try:
            limit = c_uint64(self._workspace_bytes)
            self._check("MatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, ctypes.byref(limit), 8)
            words = [(_REDUCTION_MASK, _NO_REDUCTION), *((name, _ALIGNMENT) for name in _MIN_ALIGNMENTS)]
            for name, value in words:
                word = c_uint32(value)
                self._check("MatmulPreferenceSetAttribute", preference, name, ctypes.byref(word), 4)
            yield preference
        finally:
            self._library.cublasLtMatmulPreferenceDestroy(preference)

    def _destroy(self, plan: MatmulPlan) -> None:
        for layout in (plan.w, plan.x, plan.y):
            if layout:
                self._library.cublasLtMatrixLayoutDestroy(layout)
        if plan.operation:
            self._library.cublasLtMatmulDescDestroy(plan.operation)


def _declare(library: ctypes.CDLL) -> None:
    """Set the argument types of every function that is called: ctypes would pass wide integers as 32 bits."""
    pointer, sized = c_void_p, [c_void_p, c_int, c_void_p, c_size_t]
    destroyers = ("Destroy", "MatmulDescDestroy", "MatrixLayoutDestroy", "MatmulPreferenceDestroy")
    signatures = {name: [pointer] for name in ("Create", "MatmulPreferenceCreate", *destroyers)} | {
        "MatmulDescCreate": [pointer, c_int, c_int],
        "MatmulDescSetAttribute": sized,
        "MatrixLayoutCreate": [pointer, c_int, c_uint64, c_uint64, c_int64],
        "MatmulPreferenceSetAttribute": sized,
        "MatmulAlgoGetHeuristic": [*[pointer] * 7, c_int, pointer, pointer],
        "Matmul": [*[pointer] * 14, c_size_t, pointer],
    }
    for name, types in signatures.items():
        getattr(library, f"cublasLt{name}").argtypes = types
    library.cublasLtGetVersion.argtypes, library.cublasLtGetVersion.restype = [], c_size_t
    library.cublasLtGetStatusString.argtypes = [c_int]
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
