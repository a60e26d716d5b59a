"""The memory plan of a model, from its config alone."""

from __future__ import annotations

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.errors import ConfigError
from cpmrt.memory.kv_pages import PAGE_SIZE, KVLayout
from cpmrt.memory.plan import MemoryPlan, check_budget, largest_context, make_plan
from cpmrt.models.decoder import EMBED, HEAD, buffer_specs, tensor_specs
from cpmrt.tensor_spec import BufferSpec


def position_limit(config: ModelConfig, engine: EngineConfig) -> int:
    """The context that was asked for, in tokens. Raises ConfigError past the range of the rotary embedding."""
    if engine.max_context is None:
        return config.default_context
    if engine.max_context > config.max_positions:
        raise ConfigError(
            "max_context is beyond the model's positions",
            expected=f"at most {config.max_positions}",
            actual=engine.max_context,
            fix="extend them with hf_overrides (rope_scaling, max_position_embeddings) if the model allows it",
        )
    return engine.max_context


def plan_model(config: ModelConfig, engine: EngineConfig, *, itemsize: int, max_context: int) -> MemoryPlan:
    """The plan for exactly `max_context` tokens a sequence; `itemsize` = bytes of a stored element."""
    rows = max(engine.prefill_chunk, engine.max_sequences)
    tables = (BufferSpec("rope", (2, max_context, config.head_dim // 2), EMBED, HEAD, itemsize=4),)
    workspace = buffer_specs(config, rows, engine.max_sequences)
    layout = KVLayout.of(config, max_context, engine.max_sequences)
    return make_plan(tensor_specs(config), tables, workspace, layout, itemsize=itemsize)


def fit_model(config: ModelConfig, engine: EngineConfig, *, itemsize: int, budget: int) -> MemoryPlan:
    """The plan within `budget` bytes.

    An explicit `max_context` is kept or refused with MemoryPlanError; without one the context is the model's own, or
    the largest that fits.
    """
    limit = position_limit(config, engine)

    def build(max_context: int) -> MemoryPlan:
        return plan_model(config, engine, itemsize=itemsize, max_context=max_context)

    context = limit
    if engine.max_context is None:
        context = largest_context(build, budget, limit) or min(limit, PAGE_SIZE)
    plan = build(context)
    check_budget(plan, budget)
    return plan
