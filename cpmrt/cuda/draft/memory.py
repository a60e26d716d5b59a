"""What drafting, verifying and accepting need in the arena beside the forwards' own buffers. Pure sizes."""

from __future__ import annotations

import numpy as np

from cpmrt.config.speculation import MAX_NODES
from cpmrt.cuda.draft.structs import DRAFT_TREE, MAX_TOP_K
from cpmrt.cuda.step.memory import lasting_buffer
from cpmrt.cuda.step.structs import TOKEN_LOGPROBS
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.tensor_spec import BufferSpec


def tree_tables(max_sequences: int, max_context: int, max_rows: int, carry_width: int) -> tuple[BufferSpec, ...]:
    """Buffers that live as long as the executor.

    `max_rows`: of a prefill chunk. `carry_width`: elements of a row of the target's hidden state that the draft reads;
    0 for a draft that reads none.
    """
    carry = (BufferSpec("carry_hidden", (max_sequences, MAX_NODES, carry_width), EMBED, HEAD),) if carry_width else ()
    return (
        lasting_buffer("history", np.int32, max_sequences, max_context),
        lasting_buffer("capacities", np.int32, max_sequences),
        lasting_buffer("carry_counts", np.int32, max_sequences),
        *carry,
        lasting_buffer("draft_tree", np.uint8, DRAFT_TREE.itemsize),
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
        lasting_buffer("draft_ids", np.int32, MAX_TOP_K, MAX_TOP_K),
        lasting_buffer("draft_logprobs", np.float32, MAX_TOP_K, MAX_TOP_K),
    )
