"""The memory that an executor needs for a draft: the buffers for drafting, verifying and accepting, and those of the
draft's own forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.speculation import MAX_NODES
from cpmrt.cuda.draft.block import block_modules, block_tables
from cpmrt.cuda.draft.structs import DRAFT_TREE, MAX_TOP_K, MAX_TREES
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.load.repack import STAGING, staging_buffers
from cpmrt.cuda.ops.attention.decode import DecodePlan
from cpmrt.cuda.ops.linear_packed.products import packed_tables
from cpmrt.cuda.ops.products import product_workspace
from cpmrt.cuda.step.memory import cuda_needs, lasting_buffer
from cpmrt.cuda.step.structs import SLOT_STATE, TOKEN_LOGPROBS
from cpmrt.models.draft import LAST_PHASE, PREFIX, Draft
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.models.planning import ExecutorNeeds
from cpmrt.tensor_spec import BufferSpec, TensorSpec

SCRATCH = "draft_scratch."
"""The prefix of the names of buffers that the draft's ops need in sizes of their own."""
_SHARED = ("block_tables", "capacities", "history", "step_context", "tree_logprobs")
_ROWS = {name: f"draft_{name}" for name in ("token_ids", "positions", "slots", "locations", "chunk")} | {
    "tree_masks": "draft_masks", "tree_base": "draft_base",
}  # fmt: skip
"""The names of the arrays of a target's rows, each with the name of the array that has a small model's rows."""


def tree_tables(max_sequences: int, max_context: int, max_rows: int, carry_width: int) -> tuple[BufferSpec, ...]:
    """Return the buffers of trees, of the draft's rows and of carried states; they live as long as the executor, and
    are zero at first.

    `max_rows`: the rows of a prefill chunk. `carry_width`: elements of a row of the target's hidden state that the
    draft reads; 0 for a draft that reads none.
    """
    carry = (BufferSpec("carry_hidden", (max_sequences, MAX_NODES, carry_width), EMBED, HEAD),) if carry_width else ()
    found = (
        lasting_buffer("history", np.int32, max_sequences, max_context),
        lasting_buffer("capacities", np.int32, max_sequences),
        lasting_buffer("carry_counts", np.int32, max_sequences),
        *carry,
        lasting_buffer("draft_tree", np.uint8, min(max_sequences, MAX_TREES), DRAFT_TREE.itemsize),
        lasting_buffer("tree_logprobs", np.uint8, MAX_NODES * TOKEN_LOGPROBS.itemsize),
        lasting_buffer("locations", np.int32, MAX_NODES),
        lasting_buffer("tree_masks", np.uint64, MAX_NODES),
        lasting_buffer("tree_base", np.int32, MAX_NODES),
        lasting_buffer("draft_token_ids", np.int32, max_rows),
        lasting_buffer("draft_positions", np.int32, max_rows),
        lasting_buffer("draft_slots", np.int32, max_rows),
        lasting_buffer("draft_chunk", np.int32, 4),
        lasting_buffer("draft_locations", np.int32, MAX_NODES),
        lasting_buffer("draft_masks", np.uint64, MAX_NODES),
        lasting_buffer("draft_base", np.int32, MAX_NODES),
        lasting_buffer("draft_ids", np.int32, MAX_NODES, MAX_TOP_K),
        lasting_buffer("draft_logprobs", np.float32, MAX_NODES, MAX_TOP_K),
    )
    return tuple(replace(spec, zeroed=True) for spec in found)


def chain_tables(max_sequences: int, carry_width: int) -> tuple[BufferSpec, ...]:
    """Return the buffers of a small model's chains, which live as long as the executor: the state of each slot's chain,
    and the row of the small model's states from which its draft goes on in the next step."""
    states = lasting_buffer("slot_states", np.uint8, max_sequences, SLOT_STATE.itemsize)
    return (states, BufferSpec("carry_kept", (carry_width,), EMBED, HEAD)) if carry_width else (states,)


def is_inner(spec: BufferSpec) -> bool:
    """Tell whether an inner draft has its own copy of this buffer of a draft."""
    return spec.name not in _SHARED and spec.name not in _ROWS


def as_target(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a small model and its draft under the names that a target's and its draft's have."""
    own = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    return own | {name: arrays[name] for name in _SHARED} | {name: arrays[row] for name, row in _ROWS.items()}


def needs_with_draft(
    config: ModelConfig,
    engine: EngineConfig,
    specs: Sequence[TensorSpec],
    draft: Draft,
    device: Device,
) -> ExecutorNeeds:
    """Return the memory that the executor needs for a target with the weights `specs` and for its draft.

    Raises UnsupportedModelError.
    """
    needs = cuda_needs(config, engine, specs, device)
    for one in filter(None, (draft, draft.inner)):
        block_modules(one)  # raises UnsupportedModelError for sizes that the kernels do not take
    needs = _with_draft(needs, draft, specs, device, max_sequences=engine.max_sequences)
    return _with_inner(needs, draft, device, max_sequences=engine.max_sequences) if draft.inner else needs


def _with_draft(
    needs: ExecutorNeeds,
    draft: Draft,
    specs: Sequence[TensorSpec],
    device: Device,
    *,
    max_sequences: int,
) -> ExecutorNeeds:
    """Return `needs`, those of the target, with the draft's buffers added."""
    assert needs.max_rows is not None
    max_rows = needs.max_rows
    workspace = [spec for spec in needs.workspace if spec.name != STAGING]
    workspace += staging_buffers((*specs, *draft.tensors))

    counters = packed_tables(_weights(draft, specs), device)
    num_drafting = 1 if draft.inner else min(max_sequences, MAX_TREES)

    def tables(max_context: int) -> tuple[BufferSpec, ...]:
        own = _draft_tables(draft, counters, max_context, device)
        tree = tree_tables(max_sequences, max_context, max_rows, draft.config.hidden_width)
        return (*needs.tables(max_context), *tree, *block_tables(draft, num_drafting), *own)

    return replace(
        needs,
        tables=tables,
        workspace=(*workspace, *_draft_workspace(draft, specs, max_rows, device)),
        num_drafting=num_drafting,
    )


def _with_inner(needs: ExecutorNeeds, draft: Draft, device: Device, *, max_sequences: int) -> ExecutorNeeds:
    """Return `needs` with the buffers of a small model's own draft added, whose target is the small model."""
    assert draft.inner is not None
    head, width = draft.inner.head, draft.inner.config.hidden_width
    inner = replace(draft.inner, specs=_as_targets(draft.inner.specs), head=head and _as_targets((head,))[0])
    alone = ExecutorNeeds(max_rows=needs.max_rows)
    found = _with_draft(alone, inner, _as_targets(draft.specs), device, max_sequences=max_sequences)

    def tables(max_context: int) -> tuple[BufferSpec, ...]:
        own = (*filter(is_inner, found.tables(max_context)), *chain_tables(max_sequences, width))
        return (*needs.tables(max_context), *(replace(spec, name=PREFIX + spec.name) for spec in own))

    # The passes of an inner draft come after those of the small model.
    workspace = (
        replace(spec, name=PREFIX + spec.name, last=2 * LAST_PHASE) for spec in found.workspace if spec.name != STAGING
    )
    return replace(needs, tables=tables, workspace=(*needs.workspace, *workspace))


def _as_targets(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return weights of a small model, or of its draft, under the names that a target's, or its draft's, have."""
    return tuple(replace(spec, name=spec.name.removeprefix(PREFIX)) for spec in specs)


def _weights(draft: Draft, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the weights of the draft's products: its own, and if it has no head, the target's among `specs`."""
    if any(spec.name == f"{PREFIX}lm_head" for spec in draft.tensors):
        return draft.tensors
    return (*draft.tensors, *(spec for spec in specs if spec.name == "lm_head"))


def _draft_tables(
    draft: Draft, counters: Sequence[BufferSpec], max_context: int, device: Device
) -> tuple[BufferSpec, ...]:
    """Return the buffers of the draft's ops that live as long as the executor; `counters`: of its products."""
    config = draft.config.decoder
    if config is None:
        return ()
    attention = DecodePlan.of(config.attention, device, max_context)
    return tuple(_scratch(spec) for spec in (*attention.tables, *counters))


def _draft_workspace(
    draft: Draft, specs: Sequence[TensorSpec], max_rows: int, device: Device
) -> tuple[BufferSpec, ...]:
    """Return the buffers of a pass of at most `max_rows` rows, during which nothing of the target runs."""
    config = draft.config.decoder
    if config is None:
        return ()
    products = product_workspace(_weights(draft, specs), config, max_rows, device)
    return tuple(_scratch(spec) for spec in products)


def _scratch(spec: BufferSpec) -> BufferSpec:
    return replace(spec, name=SCRATCH + spec.name, first=0, last=LAST_PHASE)
