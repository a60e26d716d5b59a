"""How many sequences a speculative step may have: the most for each tree shape, and the numbers that are captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from cpmrt.config import TreeShape
from cpmrt.config.speculation import MAX_NODES
from cpmrt.cuda.draft.structs import MAX_TREES
from cpmrt.memory.caches import CacheLayout
from cpmrt.models.draft import Draft

_ALONE: dict[str, Callable[[Draft, CacheLayout], bool]] = {
    "a small model with a draft of its own: its chain is a loop of steps": lambda draft, _: draft.inner is not None,
    "recurrent states: the rows of a step are one chain": lambda _, caches: caches.has_state,
}
"""Reasons for a step to have one sequence only, each with a function that says whether it applies."""
_LATE_ROWS = 16
"""Tokens that wait for the draft after a short run of certain tokens and the draft steps around it."""


def most_sequences(draft: Draft, caches: CacheLayout) -> tuple[int, ...]:
    """Return for each tree shape of a draft how many sequences a step may have; `caches` are the target's."""
    if any(is_so(draft, caches) for is_so in _ALONE.values()):
        return (1,) * len(draft.shapes)
    return tuple(
        max(1, min(caches.max_sequences, MAX_TREES, MAX_NODES // _most_rows(draft, shape))) for shape in draft.shapes
    )


def captured_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of sequences for which a step is captured, where it may have `most`."""
    return (*(count for count in (1, 2, 4) if count < most), most)


def captured_count(num_sequences: int, most: int) -> int:
    """Return the number of sequences of the captured step that `num_sequences` sequences take."""
    counts = captured_counts(most)
    return counts[bisect_left(counts, num_sequences)]


def _most_rows(draft: Draft, shape: TreeShape) -> int:
    """Return the rows that a sequence has in the largest pass of a step."""
    if draft.config.decoder is None:
        return shape.num_nodes
    frontier = shape.top_k if shape.num_passes > 1 else 1
    return max(shape.num_nodes, waiting_rows(draft), draft.block_rows or frontier)


def waiting_rows(draft: Draft) -> int:
    """Return the most tokens that wait for the draft after a speculative step: usually no more wait at the next one."""
    return max(shape.max_emitted for shape in draft.shapes)


def late_rows(draft: Draft) -> int:
    """Return the rows of the first pass of a step under a form when more tokens wait than `waiting_rows`.

    So many wait after a plain step that has brought certain tokens. A draft with an inner draft catches up instead.
    """
    return waiting_rows(draft) if draft.inner else max(_LATE_ROWS, waiting_rows(draft))
