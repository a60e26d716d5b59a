"""The noise of the sampling chain has the Gumbel distribution out to tokens that are drawn once in a billion times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cpmrt.reference.philox import noise_of


def share_above(threshold: float) -> float:
    """Return the share of all 2^32 words whose noise exceeds the threshold; noise falls as the word grows."""
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        if noise_of(np.array([middle], np.uint32))[0] > threshold:
            low = middle + 1
        else:
            high = middle
    return low / 2**32


@pytest.mark.parametrize("threshold", [-2.5, -1.0, 0.0, 1.0, 5.0, 10.0, 15.0, 17.0, 18.5, 20.0])
def test_the_distribution(threshold: float) -> None:
    expected = -math.expm1(-math.exp(-threshold))
    assert share_above(threshold) == pytest.approx(expected, rel=0.03)


def test_no_word_gives_infinity() -> None:
    words = np.array([0, 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1], np.uint32)
    assert np.isfinite(noise_of(words)).all()
