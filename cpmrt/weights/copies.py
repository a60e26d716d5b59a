"""Tells whether a checkpoint has a matrix twice, or the same as another checkpoint."""

from __future__ import annotations

import numpy as np

from cpmrt.weights.checkpoint import Checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 64


def is_copy(ours: Checkpoint, theirs: Checkpoint, name: str, their_name: str) -> bool:
    """Tell whether two checkpoints hold the same matrix, as far as rows spread over it tell.

    A matrix that one of them lacks, or holds as another type, counts as a copy: that is what drafts are made with.
    """
    own, other = ours.entries.get(name), theirs.entries.get(their_name)
    if own is None or other is None or own.dtype != other.dtype:
        return True
    if own.shape != other.shape:
        return False
    rows = np.unique(np.linspace(0, own.shape[0] - 1, _COMPARED_ROWS).astype(int))
    return bool(ours.view(name)[rows].tobytes() == theirs.view(their_name)[rows].tobytes())
