"""Log-probabilities of rows of logits, as answers, scores of prompts and drafts have them."""

from __future__ import annotations

import numpy as np

from cpmrt.dtypes import F32
from cpmrt.errors import NonFiniteLogitsError


def log_softmax(logits: F32) -> F32:
    """Return the logarithm of the softmax over the last axis, in float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs: F32 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


def checked_log_softmax(logits: F32, position: int) -> F32:
    """Return `log_softmax` of rows [T, V]; `position` is that of the token after the first row.

    Raises NonFiniteLogitsError.
    """
    bad = np.flatnonzero(~np.isfinite(logits.max(axis=-1)))
    if len(bad):
        raise NonFiniteLogitsError.at(position + int(bad[0]))
    return log_softmax(logits)
