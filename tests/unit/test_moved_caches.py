"""The caches whose rows the end of a speculative step moves: what its kernel does not take is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cpmrt.cuda.draft.kernels import TreeKernels
from cpmrt.errors import UnsupportedModelError

FIELDS = (
    "block_tables", "capacities", "carry_counts", "chunk", "draft_chunk", "draft_ids", "draft_logprobs",
    "draft_positions", "draft_slots", "draft_token_ids", "draft_tree", "history", "slot_states", "slots",
    "step_context", "token_ids", "tree_logprobs",
)  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "actual"), [([(1, 2, 3, 64, 8)] * 4, "4 of 1 shapes"), ([(1, 2, 3, 64, 8), (1, 2, 64, 8)], "2 of 2")]
)
def test_more_caches_or_other_shapes_than_the_kernel_moves_are_refused(shapes: list[Any], actual: str) -> None:
    caches: Any = SimpleNamespace(moved=lambda arrays: [SimpleNamespace(shape=shape) for shape in shapes])
    nothing: Any = None
    with pytest.raises(UnsupportedModelError, match=f"at most 3 of one shape.*{actual}"):
        TreeKernels(nothing, nothing, dict.fromkeys(FIELDS), caches, nothing, nothing, draft_vocab=0)
