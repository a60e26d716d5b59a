"""The memory plan of a model, from its config alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.engine import FP8
from cpmrt.config.speculation import MAX_NODES
from cpmrt.errors import ConfigError
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.memory.packed_regions import PackedRegions, canonical_regions
from cpmrt.memory.plan import MemoryPlan, check_budget, largest_context, make_plan
from cpmrt.models import decoder
from cpmrt.tensor_spec import BufferSpec, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised_specs import quantise_head, quantised_specs
from cpmrt.weights.ternary import ternary_specs

if TYPE_CHECKING:
    from cpmrt.models.draft import Draft


def weight_specs(
    config: ModelConfig, engine: EngineConfig, checkpoint: Checkpoint | None = None
) -> tuple[TensorSpec, ...]:
    """Return every weight as it is to be held: in 16 bits, or quantised as the checkpoint and the settings say.

    16-bit matrices that are ternary are held in 2 bits. Without a checkpoint config.json alone decides. Raises
    CheckpointError, ConfigError, UnsupportedModelError.
    """
    specs = quantised_specs(decoder.tensor_specs(config), config.quantization, checkpoint)
    specs = quantise_head(specs, engine.lm_head_bits)
    if checkpoint is None or checkpoint.is_gguf or config.quantization is not None or engine.load_format != "auto":
        return specs
    return ternary_specs(specs, checkpoint)


@contextmanager
def open_weights(
    folder: ModelFolder, engine: EngineConfig
) -> Iterator[tuple[Checkpoint | None, tuple[TensorSpec, ...]]]:
    """Yield the checkpoint of a model (None where the weights are random) and the specs that it was compared with.

    Raises as `weight_specs` does.
    """
    if engine.load_format == "dummy":
        yield None, weight_specs(folder.config, engine)
        return
    with Checkpoint.open(folder.path) as checkpoint:
        specs = weight_specs(folder.config, engine, checkpoint)
        check(specs, checkpoint)
        yield checkpoint, specs


def position_limit(config: ModelConfig, engine: EngineConfig) -> int:
    """Return the context that was asked for, or the model's default, in tokens.

    Raises ConfigError past the range of the rotary embedding.
    """
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


@dataclass(frozen=True)
class ExecutorNeeds:
    """The memory that an executor needs beside the model's own buffers, and the sizes of its steps.

    `tables(max_context)` live for ever. `workspace` holds the buffers of one step, `context_workspace(max_context)`
    those whose sizes depend on the context. A step has at most `max_rows` rows, of which `logit_rows` reach the head
    (None: as many as the engine's settings say). At most `num_drafting` sequences draft in one step. `packed` is the
    layout of quantised weights.
    """

    tables: Callable[[int], tuple[BufferSpec, ...]] = lambda max_context: ()
    workspace: tuple[BufferSpec, ...] = ()
    context_workspace: Callable[[int], tuple[BufferSpec, ...]] = lambda max_context: ()
    max_rows: int | None = None
    logit_rows: int | None = None
    num_drafting: int = 1
    packed: PackedRegions = canonical_regions


def plan_model(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    itemsize: int,
    max_context: int,
    needs: ExecutorNeeds = ExecutorNeeds(),
    specs: Sequence[TensorSpec] | None = None,
    draft: Draft | None = None,
) -> MemoryPlan:
    """Return the plan for exactly `max_context` tokens a sequence; `itemsize` = bytes of a stored element.

    `specs`: the target's weights (None: those that `weight_specs` finds by config.json alone). `draft`: the draft, if
    there is one; its weights, tables, pages and workspace are parts of the plan.
    """
    config = config.for_context(max_context)
    if specs is None:
        specs = weight_specs(config, engine)
    rows = needs.max_rows or max(engine.prefill_chunk, engine.max_sequences, MAX_NODES if draft else 1)
    logit_rows = max(needs.logit_rows or engine.max_sequences, draft.max_tree_size if draft else 1)
    workspace = [*decoder.buffer_specs(config, rows, logit_rows), *needs.workspace]
    workspace += needs.context_workspace(max_context)
    tables = [table.spec for table in decoder.tables(config, max_context, max_context)]
    tables += needs.tables(max_context)
    chain_rows = draft.max_tree_size if draft else 0
    if needs.num_drafting > 1 and engine.kv_dtype == FP8:
        chain_rows = MAX_NODES  # the nodes of all trees of a step
    sizes = max_context, engine.max_sequences, engine.kv_dtype
    caches, of_drafts = decoder.cache_layout(config, *sizes, chain_rows=chain_rows), dict[str, CacheLayout | None]()
    if draft is not None:
        from cpmrt.models import draft as drafts  # no plan without a draft needs it

        caches.check_draft(has_chains_only=all(shape.is_chain for shape in draft.shapes))
        specs = (*specs, *draft.tensors)
        workspace += drafts.buffer_specs(draft, rows, needs.num_drafting)
        tables += (table.spec for table in drafts.tables(draft, max_context, max_context))
        slots = max_context, engine.max_sequences
        of_drafts = {"draft_caches": draft.cache_layout(*slots), "inner_caches": draft.inner_cache_layout(*slots)}
    return make_plan(specs, tables, workspace, caches, itemsize=itemsize, packed=needs.packed, **of_drafts)


def fit_model(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    itemsize: int,
    budget: int,
    needs: ExecutorNeeds = ExecutorNeeds(),
    specs: Sequence[TensorSpec] | None = None,
    draft: Draft | None = None,
) -> MemoryPlan:
    """Return a plan within `budget` bytes; `specs` and `draft` as in `plan_model`.

    An explicit `max_context` is kept or refused with MemoryPlanError; without one the context is the model's own, or
    the largest that fits.
    """
    limit = position_limit(config, engine)
    weights = weight_specs(config, engine) if specs is None else specs

    def build(max_context: int, settings: EngineConfig = engine) -> MemoryPlan:
        return plan_model(
            config, settings, itemsize=itemsize, max_context=max_context, needs=needs, specs=weights, draft=draft
        )

    def how_to_fit() -> str:
        if largest := largest_context(build, budget, limit):
            return f"choose a smaller max_context ({largest} fits) or a larger memory_budget"
        return _with_fewer_sequences(build, engine, budget, (context, shortest))

    context, shortest = limit, min(limit, PAGE_SIZE)
    if engine.max_context is None:
        context = largest_context(build, budget, limit) or shortest
    plan = build(context)
    check_budget(plan, budget, how_to_fit)
    return plan


def _with_fewer_sequences(
    build: Callable[[int, EngineConfig], MemoryPlan], engine: EngineConfig, budget: int, contexts: Sequence[int]
) -> str:
    """Return the hint of an error message: a smaller number of sequences with which one of the contexts fits.

    The contexts are tried in order; the hint is another one if none fits with any number.
    """
    for context in contexts:
        for count in range(engine.max_sequences - 1, 0, -1):
            if build(context, replace(engine, max_sequences=count)).total_bytes <= budget:
                return (
                    f"choose a smaller max_sequences ({count} fits, with {context} tokens of context each) or a larger "
                    "memory_budget"
                )
    return (
        "no context fits beside these weights: choose a smaller model, 4-bit weights (cpmrt quantize makes them) or a "
        "larger memory_budget"
    )
