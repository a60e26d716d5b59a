"""From a model folder to a running CUDA executor: device, plan, arena, weights, graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cpmrt import opening
from cpmrt.collector import no_collections
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.driver.device import Device, open_device
from cpmrt.cuda.driver.graphs import check_loops
from cpmrt.cuda.load.repack import Destination, takes_blocks
from cpmrt.cuda.ops.screened_head import has_screenable_head
from cpmrt.cuda.step.memory import check_supported, cuda_needs
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError
from cpmrt.executor import Executor
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.planning import ExecutorNeeds
from cpmrt.opening import Blueprint, open_blueprint
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.gguf.specs import without_blocks
from cpmrt.weights.model_folder import ModelFolder

if TYPE_CHECKING:
    from cpmrt.models.draft import Draft

_LOG = logging.getLogger(__name__)
_RESERVED_BYTES = 512 << 20
"""Bytes of free memory that a plan leaves to the driver, for modules, graphs and the handles of cuBLASLt."""


@dataclass(frozen=True)
class CudaTarget:
    """The rules of the CUDA executor for a blueprint: storage type, supported shapes, weight specs and its own buffers.

    `device` need not be in this machine.
    """

    device: Device
    itemsize: int = DType.BFLOAT16.itemsize

    def dtype(self, config: ModelConfig, settings: EngineConfig) -> DType:
        """Return the storage type. A checkpoint in float32 is held in bfloat16, which has its range."""
        dtype = settings.storage_dtype(config.dtype)
        if dtype is not DType.FLOAT32:
            return dtype
        if settings.dtype != "auto":
            raise ConfigError(
                "dtype", expected="bfloat16 or float16 on a GPU", actual="float32", fix="use executor='reference'"
            )
        return DType.BFLOAT16

    def check(self, config: ModelConfig, settings: EngineConfig) -> None:
        """Raise UnsupportedModelError for a shape that the kernels do not take."""
        check_supported(config)

    def held(
        self, specs: tuple[TensorSpec, ...], checkpoint: Checkpoint | None = None, dtype: DType | None = None
    ) -> tuple[TensorSpec, ...]:
        """Return the specs as they are held: GGUF blocks that no packed product takes become 16 bits; warn in the log.

        An embedding, of which a step reads a few rows, is held in 16 bits without a warning.
        """
        refused = [spec for spec in specs if spec.quant is not None and spec.quant.in_blocks and not takes_blocks(spec)]
        matrices = [spec for spec in refused if spec.product is not None]
        if matrices:
            types = sorted({source.packing.format for spec in matrices for source in spec.sources if source.packing})
            _LOG.warning(
                "%d matrices in blocks of %s are held in 16 bits, rounded to the nearest: their speed and their memory "
                "are those of a 16-bit model", len(matrices), ", ".join(types),
            )  # fmt: skip
        return without_blocks(specs, {spec.name for spec in refused})

    def has_screenable_head(self, specs: tuple[TensorSpec, ...]) -> bool:
        """Whether an 8-bit copy of the output head can screen it."""
        return has_screenable_head(specs)

    def needs(
        self, config: ModelConfig, settings: EngineConfig, specs: Sequence[TensorSpec], draft: Draft | None
    ) -> ExecutorNeeds:
        """Return the buffers of steps, ops and drafting. Raises UnsupportedModelError."""
        if draft is None:
            return cuda_needs(config, settings, specs, self.device)
        from cpmrt.cuda.draft.memory import needs_with_draft

        return needs_with_draft(config, settings, specs, draft, self.device)


def fetch_weights(folder: ModelFolder, settings: EngineConfig) -> None:
    """Fetch the missing weights of a model on a hub, if its config says that the device can run it.

    Raises as `open_executor` does.
    """
    if folder.lacks_weights:
        device = open_device()
        opening.fetch_weights(folder, settings, CudaTarget(device), settings.memory_budget or _free_bytes(device))


def _free_bytes(device: Device) -> int:
    return max(device.free_bytes() - _RESERVED_BYTES, 1)


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Open the device, plan within its free memory, load the weights and capture the graphs.

    Raises NoDeviceError, UnsupportedModelError, ConfigError, MemoryPlanError, CheckpointError, KernelCompileError.
    """
    device = open_device()
    free = _free_bytes(device)
    with open_blueprint(folder, settings, CudaTarget(device)) as blueprint:
        plan = blueprint.fit(settings.memory_budget or free, free)
        with no_collections():
            from cpmrt.cuda.executor import CudaExecutor

        if settings.steps_per_launch > 1:
            check_loops(device, "steps_per_launch", "leave steps_per_launch at 1")
        if settings.speculation is not None and settings.speculation.inner is not None:
            check_loops(device, "speculate: inner", "leave inner out")
        return CudaExecutor(blueprint, plan, device, partial(load, blueprint)), plan


def load(blueprint: Blueprint, to: Destination) -> None:
    """Fill all weights: from their checkpoints, or at random."""
    for specs, checkpoint in blueprint.parts:
        # Imported here because a start needs only one of the two modules.
        if checkpoint is None:
            from cpmrt.cuda.load.random import load_random

            load_random(specs, to, blueprint.settings.seed)
        else:
            from cpmrt.cuda.load.upload import load_checkpoint

            load_checkpoint(specs, checkpoint, to)
