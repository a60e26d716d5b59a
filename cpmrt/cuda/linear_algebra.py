"""CuPy as an array library with its linear algebra, for programs that compute on whole matrices."""

from __future__ import annotations

from types import ModuleType

from cpmrt.errors import NoDeviceError
from cpmrt.installation import pip_install


def open_cupy() -> ModuleType:
    """Return the module `cupy` after a decomposition has run. Raises NoDeviceError where CuPy cannot use a GPU."""
    try:
        import cupy

        cupy.linalg.cholesky(cupy.eye(2))
    except Exception as error:  # CuPy's own classes cannot be named where it is not installed
        raise NoDeviceError(
            f"CuPy cannot run on a GPU here: {type(error).__name__}: {error}",
            fix=f"install CuPy with cuBLAS and cuSOLVER ({pip_install('cupy-cuda13x[ctk]')}), or use --device cpu",
        ) from error
    module: ModuleType = cupy
    return module
