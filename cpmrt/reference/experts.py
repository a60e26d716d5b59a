"""The mixture of experts in NumPy: the choice of each row's experts, and the rows and matrices of each expert."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.ops import Routing
from cpmrt.reference.quantized import Matrix, rows_of
from cpmrt.reference.tiles import softmax


def choose(scores: F32, count: int) -> tuple[Array, F32]:
    """Return for scores [T, E] the `count` highest experts in ascending order, and the softmax over their scores.

    Of equal scores the lower index wins; NaN counts as the lowest score.
    """
    chosen = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :count], axis=1)
    taken = np.take_along_axis(scores, chosen, axis=1)
    with np.errstate(invalid="ignore"):
        return chosen, softmax(taken)


def parts(rows: F32, routing: Routing) -> F32:
    """Return [T, A F] as [T, A, F], a view: the columns of each of a row's experts."""
    return rows.reshape(len(rows), routing.experts.shape[1], -1)


def of_each(
    routing: Routing, weight: Matrix, width: int, halves: int = 1
) -> Iterator[tuple[Array, Array, tuple[Matrix, ...]]]:
    """Yield for each expert that is chosen its rows, its place among the experts of each row, and its matrices.

    `weight` is `halves` stacks of all experts' matrices [width, K], and an expert has one of each. Experts come in
    ascending order, so that a row's outputs are added in the order of its places.
    """
    num_experts = weight.shape[0] // width // halves
    for expert in range(num_experts):
        rows, places = np.nonzero(routing.experts == expert)
        if len(rows):
            starts = (((half * num_experts) + expert) * width for half in range(halves))
            yield rows, places, tuple(rows_of(weight, slice(start, start + width)) for start in starts)
