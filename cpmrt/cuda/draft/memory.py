"""Sizes of the buffers for drafting, verifying and accepting, in the arena beside the forwards' own buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpmrt.config.speculation import MAX_NODES
from cpmrt.cuda.draft.structs import DRAFT_TREE, MAX_TOP_K, MAX_TREES
from cpmrt.cuda.step.memory import lasting_buffer
from cpmrt.cuda.step.structs import SLOT_STATE, TOKEN_LOGPROBS
from cpmrt.models.draft import PREFIX
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.tensor_spec import BufferSpec

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
