"""From a model folder to a running CUDA executor: device, plan, arena, weights, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.draft.forward import executor_needs
from cpmrt.cuda.driver.device import Device, open_device
from cpmrt.cuda.driver.graphs import check_loops
from cpmrt.cuda.load.random import load_random
from cpmrt.cuda.load.repack import Destination
from cpmrt.cuda.load.upload import load_checkpoint
from cpmrt.cuda.step.memory import check_supported
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError
from cpmrt.executor import Executor
from cpmrt.memory.plan import MemoryPlan, Region
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import fit_model, open_weights, position_limit
from cpmrt.weights.model_folder import ModelFolder

_RESERVED_BYTES = 512 << 20
"""Of the free memory, for what the driver itself needs: modules, graphs, the library's handles."""


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Open the device, plan within its free memory, load and capture.

    Raises NoDeviceError, UnsupportedModelError, ConfigError, MemoryPlanError, CheckpointError, KernelCompileError.
    """
    device = open_device()
    config, dtype = folder.config, storage_dtype(folder.config, settings)
    config = config.for_context(position_limit(config, settings))
    check_supported(config)
    budget = settings.memory_budget or max(device.free_bytes() - _RESERVED_BYTES, 1)
    with (
        open_weights(folder, settings) as (checkpoint, specs),
        open_draft(folder, settings, specs) as (draft_checkpoint, draft),
    ):
        needs = executor_needs(config, settings, specs, draft, device)
        parts = [(specs, checkpoint)]
        if draft is not None:
            parts += [(draft.specs, draft_checkpoint), ((draft.head,) if draft.head else (), checkpoint)]
            if draft.config.decoder is not None:
                check_supported(draft.config.decoder)
        plan = fit_model(
            config, settings, itemsize=dtype.itemsize, budget=budget, needs=needs, specs=specs, draft=draft
        )
        from cpmrt.cuda.executor import CudaExecutor

        if settings.steps_per_launch > 1:
            check_loops(device)

        def load(arena: int, regions: Mapping[str, Region], device: Device, modules: Modules, stream: Any) -> None:
            to = Destination(arena, regions, device, Launcher(stream, modules, use_pdl=False))
            for part, source in parts:
                if source is None:
                    load_random(part, to, settings.seed)
                else:
                    load_checkpoint(part, source, to)

        limit = position_limit(config, settings)
        config = config.for_context(plan.max_context)
        return CudaExecutor(config, settings, plan, device, dtype, limit, load, draft), plan


def storage_dtype(config: ModelConfig, settings: EngineConfig) -> DType:
    """A checkpoint in float32 is held in bfloat16, which has its range; asking for float32 is a ConfigError."""
    dtype = settings.storage_dtype(config.dtype)
    if dtype is not DType.FLOAT32:
        return dtype
    if settings.dtype != "auto":
        raise ConfigError(
            "dtype", expected="bfloat16 or float16 on a GPU", actual="float32", fix="use executor='reference'"
        )
    return DType.BFLOAT16
