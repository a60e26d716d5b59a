"""Turns failures of the driver's and the runtime's calls into errors that tell the user what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cpmrt.errors import CpmrtError, DeviceError, MemoryPlanError

OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY."""
LOST_CONTEXT = frozenset((700, 702, 710, *range(714, 720), 999))
"""Results in cuda.h after which a context refuses every call. An illegal address is 700, a failed launch 719."""


@contextmanager
def device_faults() -> Iterator[None]:
    """Turn the errors of CuPy's calls into MemoryPlanError where the GPU has no memory left, else into DeviceError."""
    from cupy import cuda

    try:
        yield
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.memory.OutOfMemoryError) as error:
        raise device_fault(error) from error


def device_fault(error: Exception) -> CpmrtError:
    """Return the error to raise for CuPy's: MemoryPlanError where the GPU has no memory left, else DeviceError."""
    if getattr(error, "status", None) == OUT_OF_MEMORY or isinstance(error, MemoryError):
        return MemoryPlanError(
            "the GPU has less free memory than was planned for",
            actual=str(error),
            fix="end what else uses it (nvidia-smi), or choose a smaller max_context or memory_budget",
        )
    return DeviceError(f"the GPU failed: {error}", fix="make a new process")


def checked(answer: Sequence[Any]) -> Any:
    """Return the value that follows the status in the answer of the driver's bindings, if any.

    Raises CUDARuntimeError for a status other than success.
    """
    if int(answer[0]):
        from cupy.cuda.runtime import CUDARuntimeError

        raise CUDARuntimeError(int(answer[0]))
    return answer[1] if len(answer) > 1 else None
