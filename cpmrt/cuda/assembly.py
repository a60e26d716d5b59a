"""From a model folder to a running CUDA executor: device, plan, arena, weights, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config import EngineConfig
from cpmrt.cuda.compiler import Modules
from cpmrt.cuda.device import Device, open_device
from cpmrt.cuda.workspace import check_supported, cuda_needs
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError
from cpmrt.executor import Executor
from cpmrt.memory.plan import MemoryPlan, Region
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import fit_model, position_limit
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import check

_RESERVED_BYTES = 512 << 20
"""Of the free memory, for what the driver itself needs: modules, graphs, the library's handles."""


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Open the device, plan within its free memory, load and capture.

    Raises NoDeviceError, UnsupportedModelError, ConfigError, MemoryPlanError, CheckpointError, KernelCompileError.
    """
    device = open_device()
    check_supported(folder.config)
    dtype = _storage_dtype(folder, settings)
    budget = settings.memory_budget or max(device.free_bytes() - _RESERVED_BYTES, 1)
    capability = int(device.arch.removeprefix("sm_"))
    needs = cuda_needs(folder.config, settings, capability=capability, num_sms=device.num_sms)
    plan = fit_model(folder.config, settings, itemsize=dtype.itemsize, budget=budget, needs=needs)
    from cpmrt.cuda.executor import CudaExecutor

    def load(arena: int, regions: Mapping[str, Region], device: Device, modules: Modules, stream: Any) -> None:
        _load(folder, settings, arena, regions, device, modules, stream)

    limit = position_limit(folder.config, settings)
    return CudaExecutor(folder.config, settings, plan, device, dtype, limit, load), plan


def _storage_dtype(folder: ModelFolder, settings: EngineConfig) -> DType:
    """A checkpoint in float32 is held in bfloat16, which has its range; asking for float32 is refused."""
    dtype = settings.storage_dtype(folder.config.dtype)
    if dtype is not DType.FLOAT32:
        return dtype
    if settings.dtype != "auto":
        raise ConfigError(
            "dtype", expected="bfloat16 or float16 on a GPU", actual="float32", fix="use executor='reference'"
        )
    return DType.BFLOAT16


def _load(
    folder: ModelFolder,
    settings: EngineConfig,
    arena: int,
    regions: Mapping[str, Region],
    device: Device,
    modules: Modules,
    stream: Any,
) -> None:
    from cpmrt.cuda.dummy_fill import fill_dummy
    from cpmrt.cuda.upload import stream_checkpoint

    specs = tensor_specs(folder.config)
    if settings.load_format == "dummy":
        fill_dummy(arena, specs, regions, modules, stream, seed=settings.seed, num_sms=device.num_sms)
        stream.synchronize()
        return
    with Checkpoint.open(folder.path) as checkpoint:
        check(specs, checkpoint)
        stream_checkpoint(arena, specs, checkpoint, regions, device, modules)
