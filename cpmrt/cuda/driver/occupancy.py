"""Asks how much runs at once in the current context: its multiprocessors, clusters of blocks, the blocks of a launch.

A process may have fewer multiprocessors than its device: under MPS with a percentage of threads, in a green context.
"""

from __future__ import annotations

from typing import Any

from cpmrt.cuda.driver.faults import checked
from cpmrt.cuda.driver.launch import Kernel, allow_wide_clusters, launch_config
from cpmrt.errors import DeviceError

_PORTABLE_CLUSTER = 8
"""The most blocks of a cluster that every device with clusters takes; for more a kernel needs an attribute."""
_NOTHING = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"
"""An empty kernel in PTX, which every driver takes. The driver answers some questions only about a kernel."""


def multiprocessors(of_device: int) -> int:
    """Return the number of multiprocessors of the current context; `of_device` where the driver does not tell."""
    from cuda.bindings import driver

    counts = [of_device]
    affinity = _asked("cuCtxGetExecAffinity", driver.CUexecAffinityType.CU_EXEC_AFFINITY_TYPE_SM_COUNT)
    if affinity is not None:
        counts.append(int(affinity.param.smCount.val))
    context = _asked("cuCtxGetCurrent")
    if context is not None and hasattr(driver, "CUdevResourceType"):  # bindings of 12.4 and later
        resource = _asked("cuCtxGetDevResource", context, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        counts += [] if resource is None else [int(resource.sm.smCount)]
    return min(count for count in counts if count > 0)


def clusters_at_once(*shapes: tuple[int, int]) -> list[int]:
    """Return for each (blocks, bytes) how many clusters of so many blocks run at once when each block asks for so many
    bytes of dynamic shared memory; 0 where there is none or the driver does not tell.

    It depends on which multiprocessors of a chip are in use: boards of one kind differ.
    """
    from cuda.bindings import driver

    module = _asked("cuModuleLoadData", _NOTHING)
    if module is None:
        return [0] * len(shapes)
    try:
        kernel = _asked("cuModuleGetFunction", module, b"nothing")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(kernel, limit, max(shared_bytes for _, shared_bytes in shapes))
        if max(blocks for blocks, _ in shapes) > _PORTABLE_CLUSTER:
            allow_wide_clusters(kernel)
        counts = []
        for blocks, shared_bytes in shapes:
            cluster = blocks, 1, 1
            config = launch_config(0, cluster, (32, 1, 1), shared_bytes, cluster=cluster)
            counts.append(int(_asked("cuOccupancyMaxActiveClusters", kernel, config) or 0))
        return counts
    finally:
        driver.cuModuleUnload(module)


def check_all_resident(kernel: Kernel, num_blocks: int, block: int, shared_bytes: int) -> None:
    """Raise DeviceError unless all blocks of a launch run at once: otherwise blocks that wait for each other never end.

    `block`: threads of each; `shared_bytes`: its dynamic shared memory, which the kernel must have been allowed.
    Raises CUDARuntimeError where the driver does not answer.
    """
    from cuda.bindings import driver

    count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    num_sms = multiprocessors(checked(driver.cuDeviceGetAttribute(count, checked(driver.cuCtxGetDevice()))))
    of_one = checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.handle, block, shared_bytes))
    at_once = num_sms * of_one
    if at_once < num_blocks:
        raise DeviceError(
            f"the blocks of {kernel.name} wait for each other and do not all find room on the GPU",
            expected=f"room for {num_blocks} blocks of {block} threads with {shared_bytes} bytes of shared memory",
            actual=f"room for {at_once} on {num_sms} multiprocessors",
            fix="leave this process its multiprocessors from start to end (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, green "
            "contexts), or use weights in 16 bits",
        )


def _asked(function: str, *arguments: object) -> Any:
    """Return what a function of the driver says; None where it fails, or the driver or its bindings do not have it."""
    from cuda.bindings import driver

    try:
        status, value = getattr(driver, function)(*arguments)
    except (AttributeError, RuntimeError):
        return None
    return None if int(status) else value
