"""From a model folder to a running reference executor: checkpoint, plan, arena, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpmrt.config import EngineConfig
from cpmrt.dtypes import DType, to_float32
from cpmrt.executor import Executor
from cpmrt.memory.host_memory import available_bytes
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.planning import fit_model, open_weights, position_limit
from cpmrt.ops import QuantizedWeight
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.reference.quantized import Matrix
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import dummy, fill_dummy_quantised
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack
from cpmrt.weights.quantised import load_quantised


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Plan within the host's free memory and load.

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError.
    """
    dtype = settings.storage_dtype(folder.config.dtype)
    budget = settings.memory_budget or available_bytes()
    limit = position_limit(folder.config, settings)
    with open_weights(folder, settings) as (checkpoint, specs):
        plan = fit_model(folder.config, settings, itemsize=DType.FLOAT32.itemsize, budget=budget, specs=specs)

        def load(weights: Mapping[str, Matrix]) -> None:
            _load(specs, checkpoint, dtype, settings.seed, weights)

        return ReferenceExecutor(folder.config, plan, dtype, settings.prefill_chunk, limit, load), plan


def _load(
    specs: Sequence[TensorSpec],
    checkpoint: Checkpoint | None,
    dtype: DType,
    seed: int,
    weights: Mapping[str, Matrix],
) -> None:
    for spec in specs:
        weight = weights[spec.name]
        if not isinstance(weight, QuantizedWeight):
            words = pack(spec, checkpoint, dtype) if checkpoint else dummy(spec, dtype, seed)
            weight[:] = to_float32(words, dtype)
            continue
        arrays = {"codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros, "perm": weight.perm}
        if checkpoint:
            load_quantised(spec, checkpoint, dtype, **arrays)
        else:
            fill_dummy_quantised(spec, dtype, seed, **arrays)
