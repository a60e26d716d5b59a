"""From a model folder to a running reference executor: checkpoint, plan, arena, weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cpmrt import opening
from cpmrt.byte_sizes import format_bytes
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.dtypes import DType, to_float32
from cpmrt.errors import ConfigError, MemoryPlanError
from cpmrt.executor import Executor
from cpmrt.memory.host_memory import available_bytes
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.draft import Draft
from cpmrt.models.planning import ExecutorNeeds
from cpmrt.opening import open_blueprint
from cpmrt.ops import BlockWeight, MappedWeight
from cpmrt.reference.drafting import drafting_tables
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.reference.quantized import Matrix
from cpmrt.tensor_spec import TensorSpec
from cpmrt.weights.block_rows import load_blocks
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import dummy, fill_dummy_quantised
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.pack import pack
from cpmrt.weights.quantised import load_quantised
from cpmrt.weights.safetensors import FLOATS

_RESERVED_BYTES = 256 << 20
"""Free memory that is left for the arrays that NumPy makes while it computes."""


class ReferenceTarget:
    """The NumPy executor's part of a blueprint: float32 arrays, weights as it holds them, its drafter's tables."""

    itemsize = DType.FLOAT32.itemsize

    def dtype(self, config: ModelConfig, settings: EngineConfig) -> DType:
        """Return the type to whose values everything is rounded."""
        return settings.storage_dtype(config.dtype)

    def check(self, config: ModelConfig, settings: EngineConfig) -> None:
        """Raise ConfigError for forced accept lengths, which are for timing steps on a GPU."""
        if settings.speculation is not None and settings.speculation.forced_accept is not None:
            what = "simulate_accept needs a GPU: the NumPy executor accepts what the draft is worth"
            raise ConfigError(what, fix="leave it out")

    def held(
        self, specs: tuple[TensorSpec, ...], checkpoint: Checkpoint | None = None, dtype: DType | None = None
    ) -> tuple[TensorSpec, ...]:
        """Return the weights as they are, since NumPy takes every format. If others are quantised, a 16-bit embedding
        and head stay in their mapped file, where they take half the bytes that they would as float32."""
        if checkpoint is None or dtype is None or not any(spec.quant is not None for spec in specs):
            return specs
        return tuple(replace(spec, mapped_as=dtype) if _can_map(spec, checkpoint, dtype) else spec for spec in specs)

    def has_screenable_head(self, specs: tuple[TensorSpec, ...]) -> bool:
        """Return False: every step computes the whole head."""
        return False

    def needs(
        self, config: ModelConfig, settings: EngineConfig, specs: Sequence[TensorSpec], draft: Draft | None
    ) -> ExecutorNeeds:
        """Return the tables of the drafter."""
        if draft is None:
            return ExecutorNeeds()
        return ExecutorNeeds(tables=lambda max_context: drafting_tables(draft, max_context, settings.max_sequences))


def _can_map(spec: TensorSpec, checkpoint: Checkpoint, dtype: DType) -> bool:
    """Tell whether a weight is an embedding or a head whose file holds it in the very form in which it is used."""
    source = spec.sources[0]
    is_plain = spec.quant is None and len(spec.sources) == 1 and source.packing is None and source.rows is None
    if not is_plain or not (spec.name == "embed_tokens" or spec.product == "head"):
        return False
    entry = checkpoint.entries.get(source.name)
    return entry is not None and dtype.itemsize == 2 and FLOATS.get(entry.dtype) is dtype


def fetch_weights(folder: ModelFolder, settings: EngineConfig) -> None:
    """Fetch the weights of a hub's model that are not here, if its config says that they can run in this memory.

    Raises as `open_executor` does.
    """
    opening.fetch_weights(folder, settings, ReferenceTarget(), _budget(settings))


def _budget(settings: EngineConfig) -> int:
    if settings.memory_budget is not None:
        return settings.memory_budget
    free = available_bytes()
    if free <= _RESERVED_BYTES:
        raise MemoryPlanError(
            "the system leaves this process too little memory", expected=f"more than {format_bytes(_RESERVED_BYTES)}",
            actual=format_bytes(free), fix="close other programs, or raise the limit of the process (ulimit -v)",
        )  # fmt: skip
    return free - _RESERVED_BYTES


def open_executor(folder: ModelFolder, settings: EngineConfig) -> tuple[Executor, MemoryPlan]:
    """Plan within the memory budget, else the host's free memory; return the executor, loaded, and its plan.

    Raises CheckpointError, ConfigError, UnsupportedModelError, MemoryPlanError.
    """
    with open_blueprint(folder, settings, ReferenceTarget()) as blueprint:
        plan, dtype = blueprint.fit(_budget(settings)), blueprint.dtype

        def load(weights: Mapping[str, Matrix]) -> None:
            for specs, checkpoint in blueprint.parts:
                _load(specs, checkpoint, dtype, settings.seed, weights)

        limit = blueprint.position_limit
        mapped = {
            spec.name: MappedWeight(checkpoint.view(spec.sources[0].name), spec.mapped_as)
            for specs, checkpoint in blueprint.parts
            for spec in specs
            if checkpoint is not None and spec.mapped_as is not None
        }
        try:
            executor = ReferenceExecutor(
                folder.config, plan, dtype, settings.prefill_chunk, limit, load, blueprint.draft, mapped
            )
        except MemoryError as error:
            raise MemoryPlanError(
                f"the system does not give the memory of the plan: {error}", expected=format_bytes(plan.total_bytes),
                fix="choose a smaller max_context or memory_budget",
            ) from error
        return executor, plan


def _load(
    specs: Sequence[TensorSpec],
    checkpoint: Checkpoint | None,
    dtype: DType,
    seed: int,
    weights: Mapping[str, Matrix],
) -> None:
    for spec in specs:
        weight = weights[spec.name]
        if checkpoint:
            checkpoint.release()
        if isinstance(weight, MappedWeight):
            continue
        if isinstance(weight, np.ndarray):
            words = pack(spec, checkpoint, dtype) if checkpoint else dummy(spec, dtype, seed)
            weight[:] = to_float32(words, dtype)
        elif isinstance(weight, BlockWeight):
            if checkpoint is None:
                raise ConfigError("random weights in blocks of GGUF", expected="a GPU", fix="use weight bits instead")
            load_blocks(spec, checkpoint, [rows for _, rows in weight.parts])
        elif checkpoint:
            load_quantised(spec, checkpoint, dtype, weight)
        else:
            fill_dummy_quantised(spec, dtype, seed, weight)
