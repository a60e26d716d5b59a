"""The struct that the kernels of a speculative step share, as `kernels_cu/include/draft_tree.cuh` declares it."""

from __future__ import annotations

from cpmrt.config.speculation import MAX_CANDIDATES, MAX_NODES
from cpmrt.cuda.step.structs import struct

MAX_TOP_K = 32
MAX_TREES = 8
"""The most sequences of a speculative step."""

DRAFT_TREE = struct(
    16,
    ("slot", "<i4"),
    ("position", "<i4"),
    ("root_token", "<i4"),
    ("capacity", "<i4"),
    ("max_context", "<i4"),
    ("num_generated", "<i4"),
    ("num_steps", "<i4"),
    ("path_length", "<i4"),
    ("sequence", "<u8"),
    ("frontier_masks", "<u8", (MAX_NODES,)),
    ("frontier", "<i4", (MAX_NODES,)),
    ("tokens", "<i4", (MAX_NODES,)),
    ("parents", "<i4", (MAX_NODES,)),
    ("depths", "<i4", (MAX_NODES,)),
    ("sampled", "<i4", (MAX_NODES,)),
    ("path", "<i4", (MAX_NODES,)),
    ("candidate_tokens", "<i4", (MAX_CANDIDATES,)),
    ("scores", "<f4", (MAX_CANDIDATES,)),
)
