"""What drafting, verifying and accepting need in the arena beside the forwards' own buffers. Pure sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmrt.config.speculation import MAX_NODES
from cpmrt.cuda.draft.structs import DRAFT_TREE, MAX_TOP_K
from cpmrt.cuda.step.structs import TOKEN_LOGPROBS
from cpmrt.models.decoder import EMBED, HEAD
from cpmrt.tensor_spec import BufferSpec

TREE_TYPES: dict[str, Any] = {
    "history": np.int32, "capacities": np.int32, "carry_counts": np.int32, "carry_hidden": np.uint16,
    "draft_tree": np.uint8, "tree_logprobs": np.uint8, "locations": np.int32, "tree_masks": np.uint64,
    "tree_base": np.int32, "draft_token_ids": np.int32, "draft_positions": np.int32, "draft_slots": np.int32,
    "draft_locations": np.int32, "draft_masks": np.uint64, "draft_base": np.int32, "draft_chunk": np.int32,
    "draft_ids": np.int32, "draft_logprobs": np.float32,
}  # fmt: skip
"""NumPy type of each buffer. All begin as zeros but `capacities`, positions that each slot's block table has pages for,
and `draft_slots`, -1."""


def tree_tables(max_sequences: int, max_context: int, max_rows: int, carry_width: int) -> tuple[BufferSpec, ...]:
    """Buffers that live as long as the executor.

    `max_rows`: of a prefill chunk. `carry_width`: elements of a row of the target's hidden state that the draft reads;
    0 for a draft that reads none.
    """
    carry = (BufferSpec("carry_hidden", (max_sequences, MAX_NODES, carry_width), EMBED, HEAD),) if carry_width else ()
    return (
        _table("history", 4, max_sequences, max_context),
        _table("capacities", 4, max_sequences),
        _table("carry_counts", 4, max_sequences),
        *carry,
        _table("draft_tree", 1, DRAFT_TREE.itemsize),
        _table("tree_logprobs", 1, MAX_NODES * TOKEN_LOGPROBS.itemsize),
        _table("locations", 4, MAX_NODES),
        _table("tree_masks", 8, MAX_NODES),
        _table("tree_base", 4, MAX_NODES),
        _table("draft_token_ids", 4, max_rows),
        _table("draft_positions", 4, max_rows),
        _table("draft_slots", 4, max_rows),
        _table("draft_chunk", 4, 4),
        _table("draft_locations", 4, MAX_NODES),
        _table("draft_masks", 8, MAX_NODES),
        _table("draft_base", 4, MAX_NODES),
        _table("draft_ids", 4, MAX_TOP_K, MAX_TOP_K),
        _table("draft_logprobs", 4, MAX_TOP_K, MAX_TOP_K),
    )


def _table(name: str, itemsize: int, *shape: int) -> BufferSpec:
    return BufferSpec(name, shape, EMBED, HEAD, itemsize=itemsize)
