"""Tells whether two matrices, of one checkpoint or of two, are the same."""

from __future__ import annotations

import numpy as np

from cpmrt.weights.checkpoint import Checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 64


def is_copy(ours: Checkpoint, theirs: Checkpoint, name: str, their_name: str) -> bool:
    """Tell whether `name` of one checkpoint is the same matrix as `their_name` of the other, by rows spread over it.

    A matrix that one of them lacks, or holds as another type, counts as the same: drafts are made with a copy of it.
    """
    own, other = ours.entries.get(name), theirs.entries.get(their_name)
    if own is None or other is None or own.dtype != other.dtype:
        return True
    if own.shape != other.shape:
        return False
    rows = np.linspace(0, own.shape[0] - 1, _COMPARED_ROWS).astype(int)  # np.unique would import numpy.ma
    return bool(ours.view(name)[rows].tobytes() == theirs.view(their_name)[rows].tobytes())
