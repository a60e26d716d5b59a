"""From a model folder to a running reference executor: checkpoint, plan, arena, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from cpmrt.config import EngineConfig
from cpmrt.dtypes import DType, to_float32
from cpmrt.executor import Executor
from cpmrt.memory.host_memory import available_bytes
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.planning import fit_model, position_limit, weight_specs
from cpmrt.ops import QuantizedWeight
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.reference.quantized import Matrix
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import dummy, fill_dummy_quantised
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import check, pack
from cpmrt.weights.quantised import load_quantised


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Plan within the host's free memory and load.

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError.
    """
    dtype = settings.storage_dtype(folder.config.dtype)
    budget = settings.memory_budget or available_bytes()
    limit = position_limit(folder.config, settings)
    with ExitStack() as stack:
        checkpoint = None
        if settings.load_format != "dummy":
            checkpoint = stack.enter_context(Checkpoint.open(folder.path))
        specs = weight_specs(folder.config, settings, checkpoint)
        if checkpoint is not None:
            check(specs, checkpoint)
        plan = fit_model(folder.config, settings, itemsize=DType.FLOAT32.itemsize, budget=budget, specs=specs)

        def load(weights: Mapping[str, Matrix]) -> None:
            if checkpoint is None:
                _load_dummy(specs, dtype, settings.seed, weights)
            else:
                _load_checkpoint(specs, checkpoint, dtype, weights)

        return ReferenceExecutor(folder.config, plan, dtype, settings.prefill_chunk, limit, load), plan


def _load_checkpoint(
    specs: Sequence[TensorSpec], checkpoint: Checkpoint, dtype: DType, weights: Mapping[str, Matrix]
) -> None:
    for spec in specs:
        weight = weights[spec.name]
        if isinstance(weight, QuantizedWeight):
            load_quantised(
                spec, checkpoint, dtype, codes=weight.codes, scales=weight.scales, zeros=weight.zeros, perm=weight.perm
            )
        else:
            weight[:] = to_float32(pack(spec, checkpoint, dtype), dtype)


def _load_dummy(specs: Sequence[TensorSpec], dtype: DType, seed: int, weights: Mapping[str, Matrix]) -> None:
    for spec in specs:
        weight = weights[spec.name]
        if isinstance(weight, QuantizedWeight):
            fill_dummy_quantised(
                spec, dtype, seed, codes=weight.codes, scales=weight.scales, zeros=weight.zeros, perm=weight.perm
            )
        else:
            weight[:] = to_float32(dummy(spec, dtype, seed), dtype)
