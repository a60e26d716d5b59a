"""How many clusters of blocks run on the current device at once, when each block takes a whole multiprocessor."""

from __future__ import annotations

from typing import Any

_BLOCKS = 8
_NOTHING = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"
"""A kernel in PTX, which every driver takes: the question is asked of a kernel."""


def whole_clusters(shared_bytes: int) -> int:
    """Clusters of eight blocks with so much dynamic shared memory; 0 where the driver does not tell.

    It depends on which multiprocessors of a chip are in use: boards of one kind differ.
    """
    from cuda.bindings import driver

    try:
        status, module = driver.cuModuleLoadData(_NOTHING)
    except RuntimeError:  # no driver
        return 0
    if int(status):
        return 0
    try:
        _, kernel = driver.cuModuleGetFunction(module, b"nothing")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(kernel, limit, shared_bytes)
        status, count = driver.cuOccupancyMaxActiveClusters(kernel, _launch(driver, shared_bytes))
        return 0 if int(status) else int(count)
    finally:
        driver.cuModuleUnload(module)


def _launch(driver: Any, shared_bytes: int) -> Any:
    config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = _BLOCKS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = _BLOCKS, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return config
