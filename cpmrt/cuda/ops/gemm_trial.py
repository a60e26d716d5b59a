"""Finds which of cuBLASLt's algorithms give the bits of gemm.cu: each is tried once, on random operands.

Algorithms differ in how they group the terms of a sum, and in how they add the product to y. Both show in the last bits
of some of a few thousand random sums, whatever the shape that an algorithm was suggested for. A trial loads the kernel
of the algorithm, which takes some ms even if it is refused, so verdicts are kept beside the cubins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.cuda.build import cubin_cache
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.blaslt import Algorithm, CublasLt, CublasLtError
from cpmrt.dtypes import Array, DType, from_float32

if TYPE_CHECKING:
    from cupy.cuda import Stream

ROWS, COLUMNS, INNER = 64, 128, 2048
_FACTORS = ((1.0, 0.0), (0.3, 1.0))
"""alpha and beta of the trials: a product alone, and one that is added to y."""
_KIND = "verdict"
_KEPT = {False: b"differs", True: b"agrees"}

Product = Callable[[DeviceArray, DeviceArray, DeviceArray, float, float], None]
"""Launches y = alpha x w^T + beta y, given y, x, w, alpha and beta."""


class GemmTrial:
    """Compares the library's algorithms with `own`, gemm.cu, in the last part of `workspace`, bytes on the device.

    The library may use the first `free_bytes` of the workspace. `basis` returns what a verdict depends on besides the
    library's version and the algorithm: the cubin of gemm.cu, the device and its driver.
    """

    def __init__(
        self, workspace: DeviceArray, dtype: DType, stream: Stream, own: Product, basis: Callable[[], Iterable[object]]
    ):
        self._workspace, self._dtype, self._stream, self._own, self._basis = workspace, dtype, stream, own, basis
        self.free_bytes = workspace.nbytes - 2 * (ROWS * INNER + COLUMNS * INNER + ROWS * COLUMNS)
        self._verdicts: dict[bytes, bool] = {}
        self._operands: tuple[DeviceArray, DeviceArray, DeviceArray] | None = None
        self._expected: list[Array] = []
        self._before = _random(0, ROWS, COLUMNS, dtype)

    def agrees(self, library: CublasLt, algorithm: Algorithm) -> bool:
        """Tell whether an algorithm gives the bits of gemm.cu. Waits for the stream, so not during a capture."""
        words = bytes(algorithm.words)
        if words not in self._verdicts:
            self._verdicts[words] = self._known(library, algorithm)
        return self._verdicts[words]

    def _known(self, library: CublasLt, algorithm: Algorithm) -> bool:
        """Return the verdict of an earlier start, or try and keep it."""
        trial = bytes(algorithm.words).hex(), ROWS, COLUMNS, INNER, _FACTORS, self._dtype.label, *self._basis()
        key = hashlib.sha256("\0".join(map(str, trial)).encode()).hexdigest()
        version = f"cublaslt-{library.version}"
        kept = cubin_cache.find(key, version, _KIND)
        if kept is not None:
            return kept.read_bytes() == _KEPT[True]
        try:
            verdict = self._is_equal(library, algorithm)
        except CublasLtError:  # it does not take this shape; not kept, as finding that out again costs nothing
            return False
        cubin_cache.keep(key, version, _KEPT[verdict], _KIND)
        return verdict

    def _is_equal(self, library: CublasLt, algorithm: Algorithm) -> bool:
        if self._operands is None:
            self._operands = self._placed()
            self._expected = self._products(self._own)
        plan = library.plan(ROWS, COLUMNS, INNER, self._dtype).using(algorithm)

        def product(y: DeviceArray, x: DeviceArray, w: DeviceArray, alpha: float, beta: float) -> None:
            library.matmul(plan, y.data.ptr, x.data.ptr, w.data.ptr, self._stream.ptr, alpha=alpha, beta=beta)

        return all(map(np.array_equal, self._products(product), self._expected))

    def _products(self, product: Product) -> list[Array]:
        """Return the words of y after each trial."""
        assert self._operands is not None
        y, x, w = self._operands
        results = []
        for alpha, beta in _FACTORS:
            with self._stream:
                y.set(self._before)
            product(y, x, w, alpha, beta)
            results.append(y.get(stream=self._stream))
        return results

    def _placed(self) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        """Place y, x and w in the workspace after the bytes that the library uses."""
        begin, placed = self.free_bytes, list[DeviceArray]()
        for seed, (rows, columns) in enumerate(((ROWS, COLUMNS), (ROWS, INNER), (COLUMNS, INNER))):
            end = begin + 2 * rows * columns
            array = self._workspace[begin:end].view(self._dtype.storage).reshape(rows, columns)
            with self._stream:
                array.set(_random(seed, rows, columns, self._dtype))
            placed.append(array)
            begin = end
        return placed[0], placed[1], placed[2]


def _random(seed: int, rows: int, columns: int, dtype: DType) -> Array:
    return from_float32(np.random.default_rng(seed).standard_normal((rows, columns), np.float32), dtype)
