"""From a model folder to a running reference executor: checkpoint, plan, arena, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from cpmrt.config import EngineConfig
from cpmrt.dtypes import DType, to_float32
from cpmrt.errors import ConfigError
from cpmrt.executor import Executor
from cpmrt.memory.host_memory import available_bytes
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import Draft
from cpmrt.models.draft_weights import open_draft
from cpmrt.models.planning import ExecutorNeeds, fit_model, open_weights, position_limit
from cpmrt.ops import QuantizedWeight
from cpmrt.reference.drafting import drafting_tables
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
    if settings.speculation is not None and settings.speculation.forced_accept is not None:
        raise ConfigError("simulate_accept", expected="nothing: the NumPy executor only does what its draft is worth")
    with ExitStack() as stack:
        checkpoint, specs = stack.enter_context(open_weights(folder, settings))
        draft_checkpoint, draft = stack.enter_context(open_draft(folder, settings, specs))
        needs = reference_needs(draft, settings.max_sequences)
        itemsize = DType.FLOAT32.itemsize
        plan = fit_model(
            folder.config, settings, itemsize=itemsize, budget=budget, needs=needs, specs=specs, draft=draft
        )

        def load(weights: Mapping[str, Matrix]) -> None:
            copied = (draft.head,) if draft and draft.head else ()
            _load((*specs, *copied), checkpoint, dtype, settings.seed, weights)
            _load(draft.specs if draft else (), draft_checkpoint, dtype, settings.seed, weights)

        return ReferenceExecutor(folder.config, plan, dtype, settings.prefill_chunk, limit, load, draft), plan


def reference_needs(draft: Draft | None, max_sequences: int) -> ExecutorNeeds:
    """What this executor keeps beside the model's own buffers: what it knows of the slots that it drafts for."""
    if draft is None:
        return ExecutorNeeds()
    return ExecutorNeeds(tables=lambda max_context: drafting_tables(draft, max_context, max_sequences))


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
        if checkpoint:
            load_quantised(spec, checkpoint, dtype, weight)
        else:
            fill_dummy_quantised(spec, dtype, seed, weight)
