"""The mixture of experts in NumPy: which experts a row takes, and the rows of each expert with its part of a weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.ops import Routing
from cpmrt.reference.quantized import Matrix, rows_of
from cpmrt.reference.tiles import softmax


def choose(scores: F32, count: int) -> tuple[Array, F32]:
    """Return for scores [T, E] the `count` highest experts in ascending order, and the softmax over their scores.

    Of equal scores the lower index wins; not a number counts as lowest.
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
    """Yield for each expert that is chosen its rows, its places among theirs, and its matrices [width, K].

    `weight` has as many `halves`, each of the matrices of all experts. Experts come in ascending order, so that what a
    row gets of each is in the order of its places.
    """
    num_experts = weight.shape[0] // width // halves
    for expert in range(num_experts):
        rows, places = np.nonzero(routing.experts == expert)
        if len(rows):
            starts = (((half * num_experts) + expert) * width for half in range(halves))
            yield rows, places, tuple(rows_of(weight, slice(start, start + width)) for start in starts)
