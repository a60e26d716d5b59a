"""draft_top_k.cu against reference/draft_tree.py top_k: ids exactly, log-probabilities up to rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType
from cpmrt.reference.draft_tree import top_k

pytestmark = pytest.mark.gpu

VOCABS = (33, 500, 4096, 32768, 32771, 73448, 150_000)


def launch(
    cuda: Any, logits: Any, k: int, *, slots: Any = None, token_map: Any = None, portable: bool = False
) -> tuple[Any, Any]:
    rows, vocab = logits.shape
    kernel = cuda.kernel("draft_top_k", DType.BFLOAT16, VOCAB=vocab, PORTABLE=int(portable))
    ids = cuda.array(np.full((rows, k), -7, np.int32))
    logprobs = cuda.array(np.full((rows, k), np.nan, np.float32))
    slots = cuda.array(np.zeros(rows, np.int32) if slots is None else slots)
    in_clusters = int(cuda.arch.removeprefix("sm_").rstrip("af")) >= 90 and not portable
    tokens = None if token_map is None else cuda.array(token_map)
    kernel((8 if in_clusters else 1, rows), 512, ids, logprobs, cuda.array(logits), slots, tokens, np.int32(k))
    return cuda.numpy(ids), cuda.numpy(logprobs)


def check(cuda: Any, logits: Any, k: int, *, portable: bool = False) -> None:
    ids, logprobs = launch(cuda, logits, k, portable=portable)
    for row, values in enumerate(logits):
        expected_ids, expected = top_k(values, k)
        np.testing.assert_array_equal(ids[row], expected_ids)
        np.testing.assert_allclose(logprobs[row], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_best_of_every_row(cuda: Any, vocab: int, portable: bool) -> None:
    rng = np.random.default_rng(vocab)
    for rows, k in ((1, 1), (10, 10), (3, 32)):
        check(cuda, (rng.standard_normal((rows, vocab)) * 4).astype(np.float32), k, portable=portable)


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("vocab", [500, 32768, 73448])
def test_rows_that_are_hard(cuda: Any, vocab: int, portable: bool) -> None:
    """Ids are exact for rows with ties at the edge, all logits equal, logits in order, neighbouring peaks, and most
    logits masked."""
    rng = np.random.default_rng(1)
    peaks = np.zeros(vocab, np.float32)
    peaks[100:120] = np.arange(20)
    masked = np.full(vocab, -np.inf, np.float32)
    masked[rng.permutation(vocab)[:40]] = 1.0
    coarse = rng.integers(-4, 4, vocab).astype(np.float32)
    logits = np.stack([coarse, np.zeros(vocab, np.float32), np.arange(vocab, dtype=np.float32), peaks, masked, -coarse])
    for k in (1, 10, 32):
        check(cuda, logits, k, portable=portable)


def test_a_row_does_not_depend_on_the_others(cuda: Any) -> None:
    logits = np.random.default_rng(2).standard_normal((10, 32768)).astype(np.float32)
    together = launch(cuda, logits, 10)
    for row in range(10):
        alone = launch(cuda, logits[row : row + 1], 10)
        for one, all_rows in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_rows[row])


def test_padding_and_the_map_of_a_cut_vocabulary(cuda: Any) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((3, 4096)).astype(np.float32)
    token_map = rng.permutation(73448)[:4096].astype(np.int32)
    logits[1] = np.nan
    ids, logprobs = launch(cuda, logits, 8, slots=np.array([2, -1, 2], np.int32), token_map=token_map)
    assert (ids[1] == 0).all() and (logprobs[1] == -np.inf).all()
    for row in (0, 2):
        np.testing.assert_array_equal(ids[row], token_map[top_k(logits[row], 8)[0]])
