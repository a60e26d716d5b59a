"""CuPy as an array library with its linear algebra, for programs that compute on whole matrices."""

from __future__ import annotations

from types import ModuleType

from cpmrt.cuda.driver.faults import device_faults
from cpmrt.errors import CpmrtError, NoDeviceError
from cpmrt.installation import pip_install


def open_cupy() -> ModuleType:
    """Return the module `cupy` after a decomposition has run.

    Raises NoDeviceError where there is no GPU, or no CuPy with the libraries that this takes; MemoryPlanError or
    DeviceError where the GPU fails.
    """
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own classes cannot be named where it is not installed
        raise _unusable(error) from error
    try:
        with device_faults():
            cupy.linalg.cholesky(cupy.eye(2))
    except CpmrtError:
        raise
    except Exception as error:  # whatever a missing library raises
        raise _unusable(error) from error
    module: ModuleType = cupy
    return module


def _unusable(error: Exception) -> NoDeviceError:
    return NoDeviceError(
        f"CuPy cannot run on a GPU here: {type(error).__name__}: {error}",
        fix=f"install CuPy with cuBLAS and cuSOLVER ({pip_install('cupy-cuda13x[ctk]')}), or use --device cpu",
    )
