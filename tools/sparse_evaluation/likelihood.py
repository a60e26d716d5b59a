"""Compares sparse attention's predictions on plain text with those of dense attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from demo_model.retrieval import Tokens

from cpmrt import LLM
from cpmrt.dtypes import F32
from cpmrt.log_probabilities import log_softmax
from sparse_evaluation.needles import logit_chunks


@dataclass(frozen=True)
class Predictions:
    """Some positions of a text, int64 [N], and the log-probabilities of the next token at each, float32 [N, V]."""

    positions: Tokens
    log_probs: F32


@dataclass(frozen=True)
class Divergence:
    """Means over the positions in [low, high): loss and KL(dense || this) in nats, share of equal greedy tokens."""

    low: int
    high: int
    count: int
    loss: float
    kl: float
    agreement: float


def predictions(llm: LLM, window: Tokens, stride: int) -> Predictions:
    """Returns the predictions at every `stride`-th position of a window, without its last position."""
    positions, parts = [], []
    for first, logits in logit_chunks(llm, window.tolist()):
        at = np.arange(first, first + len(logits))
        kept = (at % stride == stride - 1) & (at < len(window) - 1)
        positions.append(at[kept])
        parts.append(log_softmax(logits[kept]))
    return Predictions(np.concatenate(positions), np.concatenate(parts))


def divergences(
    windows: Sequence[Tokens], dense: Sequence[Predictions], ours: Iterator[Predictions], edges: Sequence[int]
) -> list[Divergence]:
    """Returns the divergence from `dense` in each span between neighbouring `edges` that has positions."""
    positions, losses, kls, equal = [], [], [], []
    for window, theirs, own in zip(windows, dense, ours, strict=True):
        following = window[own.positions + 1]
        positions.append(own.positions)
        losses.append(-own.log_probs[np.arange(len(following)), following])
        kls.append((np.exp(theirs.log_probs) * (theirs.log_probs - own.log_probs)).sum(axis=1))
        equal.append(own.log_probs.argmax(axis=1) == theirs.log_probs.argmax(axis=1))
    at, loss, kl, same = (np.concatenate(parts) for parts in (positions, losses, kls, equal))
    results = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        taken = (at >= low) & (at < high)
        if taken.any():
            means = (float(values[taken].mean(dtype=np.float64)) for values in (loss, kl, same))
            results.append(Divergence(low, high, int(taken.sum()), *means))
    return results
