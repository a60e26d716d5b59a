"""The results of readings, made of the chunks that the executor yields. Each `yield` lets other jobs have a step."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np

from cpmrt.dtypes import F32
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.log_probabilities import checked_log_softmax


def joined(ids: tuple[int, ...], chunks: Iterator[F32]) -> Generator[None, None, F32]:
    """Return the logits of all positions: float32 [T, V]."""
    parts = list[F32]()
    for chunk in chunks:
        parts.append(chunk)
        yield
    return np.concatenate(parts)


def scores(ids: tuple[int, ...], chunks: Iterator[F32]) -> Generator[None, None, F32]:
    """Return the log-probability of each of `ids` after the first, by chunks of logits: float32 [T - 1]."""
    parts, start = list[F32](), 0
    for logits in chunks:
        following = np.array(ids[start + 1 : start + 1 + len(logits)], np.int64)
        logprobs = checked_log_softmax(logits[: len(following)], start + 1)
        parts.append(logprobs[np.arange(len(following)), following])
        start += len(logits)
        yield
    return np.concatenate(parts)


def pooled(ids: tuple[int, ...], chunks: Iterator[F32], *, mean: bool, normalize: bool) -> Generator[None, None, F32]:
    """Return the mean of all states, or without `mean` the last state: float32 [H], with `normalize` of length 1.

    Raises NonFiniteLogitsError.
    """
    total, last = np.zeros(1), np.zeros(0, np.float32)
    for states in chunks:
        total, last = total + states.sum(axis=0, dtype=np.float64), states[-1]
        yield
    result: F32 = (total / len(ids)).astype(np.float32) if mean else last
    if not np.isfinite(result).all():
        raise NonFiniteLogitsError.of("the numbers of an embedding")
    length = np.linalg.norm(result)
    return result / length if normalize and length > 0 else result
