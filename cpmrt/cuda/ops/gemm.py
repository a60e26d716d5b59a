"""Products of a prefill chunk: cuBLASLt where it works, the own tensor-core kernel where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.blaslt import CublasLt, CublasLtError
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm_tile import gemm_tile

GEMM = KernelSpec("gemm", "linear/gemm.cu", "project_residual", ("TILE_N", "TILE_K", "STAGES"), hot=True)


class Gemm:
    """y = alpha x w^T + beta y, rounded once. `reason` says why cuBLASLt is not used, None if it is."""

    def __init__(self, device: Device, launcher: Launcher, workspace: Any, *, use_library: bool = True):
        self._device, self._launch, self._stream = device, launcher, launcher.stream
        self._dtype = launcher.modules.dtype
        self._library: CublasLt | None = None
        self.reason: str | None = None if use_library else "switched off"
        if use_library:
            try:
                self._library = CublasLt(workspace.data.ptr, workspace.nbytes)
            except CublasLtError as error:
                self.reason = str(error)

    def __call__(self, y: Any, x: Any, w: Any, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """x [M, K] and w [N, K] on the device, contiguous; y [M, N], which may be columns of a wider matrix."""
        (num_rows, inner), columns, stride = x.shape, w.shape[0], y.strides[0] // y.itemsize
        if self._library is not None:
            plan = self._library.plan(num_rows, columns, inner, self._dtype, stride)
            addresses = (y.data.ptr, x.data.ptr, w.data.ptr)
            self._library.matmul(plan, *addresses, self._stream.ptr, alpha=alpha, beta=beta)
            return
        tile = gemm_tile(num_rows, columns, inner, self._device.num_sms, self._device.shared_bytes_per_block)
        sizes = tuple(map(np.int32, (num_rows, columns, inner, stride)))
        factors, constants, smem = (np.float32(alpha), np.float32(beta)), tile.constants, tile.shared_bytes
        self._launch(GEMM, constants, tile.grid, tile.block, y, x, w, *sizes, *factors, smem=smem)

    def close(self) -> None:
        """Free the library's handles."""
        if self._library is not None:
            self._library.close()
