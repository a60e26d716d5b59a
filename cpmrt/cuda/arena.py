"""The regions of an arena as arrays of the types that kernels take, and what several of them are together."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpmrt.cuda.draft.memory import TREE_TYPES
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.kv import held_pages
from cpmrt.cuda.ops.linear_packed.memory import held_weights
from cpmrt.memory.arena import Arena

_TYPES = {
    "attention_partials": np.float32, "attention_arrivals": np.int32, "block_log_sums": np.float32,
    "packed_rows": np.uint8, "gemm_workspace": np.uint8, "block_scores": np.float32, "token_counts": np.uint32,
    "step_context": np.uint8, "block_tables": np.int32, "slot_states": np.uint8, "packed_arrivals": np.int32,
    "packed_partials": np.uint8, "dense_chunk": np.int32, "staging": np.uint8, "token_ids": np.int32,
    "positions": np.int32, "logits": np.float32, "token_map": np.int32, "rope": np.float32, "blocks": np.int32,
    "slots": np.int32, "chunk": np.int32, "expanded_tables": np.int32, "k_codes": np.uint8, "v_codes": np.uint8,
    "k_scales": np.float32, "v_scales": np.float32,
} | TREE_TYPES  # fmt: skip
_PIECES = {".codes": np.uint8, ".perm": np.int32}
"""Of quantised weights, by the end of their names."""


def held_arrays(arena: Arena, device: Device) -> dict[str, Any]:
    """Return the arrays by name: every region, packed weights, and pages in fp8."""
    plan = arena.plan
    arrays: dict[str, Any] = {region.name: arena.array(region.name, _type_of(region.name)) for region in plan.regions}
    return arrays | held_weights(plan.tensors, arrays, device) | held_pages(arrays)


def _type_of(name: str) -> Any:
    """The NumPy type of a region's elements: words of 16 bits unless a table says otherwise."""
    ends = (kind for end, kind in _PIECES.items() if name.endswith(end))
    return next(ends, _TYPES.get(name.rpartition(".")[2], np.uint16))
