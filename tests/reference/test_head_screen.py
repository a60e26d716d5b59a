"""The proof of a screened head, in NumPy: bounds hold for any weights, and what is left out can never be sampled."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.config import Sampling
from cpmrt.dtypes import DType, round_to
from cpmrt.reference.sampling import keep_mask, sample
from cpmrt.tensor_spec import Quantization
from cpmrt.weights.quantised import round_to_nearest

F32 = np.float32
HIDDEN, GROUP_TOKENS = 256, 32
SAMPLINGS = [Sampling()] + [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (1e-3, 0.7, 2.5, 1e4)
    for top_k, top_p, min_p in (
        (0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (20, 0.9, 0.0), (200, 1.0, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0),
        (20, 1.0, 0.1), (20, 0.3, 0.1), (0, 0.9, 0.1),
    )
]  # fmt: skip
KINDS = ("normal", "equal rows", "near ties", "outliers", "tiny", "zero rows", "huge")


@dataclass
class Screen:
    """A row's logits: exact ones, screened ones as the kernels know them, and how far apart the two may be."""

    exact: Any
    screened: Any
    width: Any

    def threshold(self, params: Sampling, teams: int) -> float:
        """Return the threshold of `threshold_of` in rescore.cu, from the largest lower bounds of `teams` token sets."""
        lower = (self.screened - self.width).astype(F32)
        groups = [lower[first : first + GROUP_TOKENS].max() for first in range(0, len(lower), GROUP_TOKENS)]
        best = np.full(teams, -np.inf, F32)
        for index, value in enumerate(groups):
            best[index % teams] = max(best[index % teams], value)
        top = float(best.max())
        if params.temperature == 0.0:
            return top
        threshold = -np.inf
        if 0 < params.top_k < len(lower) and params.top_k <= teams:
            kth = float(np.sort(best)[-params.top_k])
            threshold = kth - abs(kth) * 2.0**-20 - 2.0**-100
        if params.top_p == 1.0 and params.min_p > 0.0:
            below = float(F32(np.log(params.min_p))) * params.temperature
            threshold = max(threshold, top + below - (abs(top) + abs(below)) * 2.0**-20 - 2.0**-100)
        return threshold

    def rescored(self, params: Sampling, teams: int) -> Any:
        """Return the logits that the step samples from: exact, or -inf if the upper bound is below the threshold."""
        upper = (self.screened + self.width).astype(F32)
        return np.where(upper < self.threshold(params, teams), F32(-np.inf), self.exact)


def weights(kind: str, vocab: int, random: Any, dtype: DType) -> Any:
    w = random.standard_normal((vocab, HIDDEN)).astype(F32) * F32(0.1)
    if kind == "equal rows":
        w[vocab // 2 :] = w[random.integers(0, vocab // 2, vocab - vocab // 2)]
    elif kind == "near ties":
        w[:] = w[0] + F32(1e-3) * random.standard_normal(w.shape).astype(F32)
    elif kind == "outliers":
        w[:: 2 + vocab // 40, ::128] *= F32(300)
    elif kind == "tiny":
        w *= F32(1e-30 if dtype is DType.BFLOAT16 else 1e-6)
    elif kind == "zero rows":
        w[::3] = 0
    elif kind == "huge":
        w *= F32(1e12 if dtype is DType.BFLOAT16 else 1e4)
    return round_to(w, dtype)


def in_quanta(x: Any) -> Any:
    """Return a row as products with packed weights read it: integers times a power of two per slice of 128 columns."""
    slices = x.reshape(-1, 128)
    quantum = np.exp2(np.floor(np.log2(np.maximum(np.abs(slices).max(axis=1, keepdims=True), F32(2.0**-87)))) - 13)
    return (np.rint(slices / quantum) * quantum).astype(F32).reshape(-1)


def screen_of(kind: str, vocab: int, seed: int, dtype: DType, *, follows_row: bool) -> Screen:
    random = np.random.default_rng(seed)
    w = weights(kind, vocab, random, dtype)
    x = random.standard_normal(HIDDEN).astype(F32)
    if follows_row:  # hidden states of trained models resemble the row of their token
        x = x * F32(0.3) + w[0] / (np.abs(w[0]).max() + F32(1e-37)) * F32(5)
    if seed % 3 == 0:
        x[::128] *= F32(1000)
    return screen_with(w, round_to(x, dtype), dtype)


def screen_with(w: Any, x: Any, dtype: DType) -> Screen:
    codes, scales = round_to_nearest(w, Quantization(8, 128), dtype)
    held = (codes.view(np.int8).astype(F32)) * np.repeat(scales, 128, axis=1)
    apart, size = (np.linalg.norm(a.astype(np.float64), axis=1) for a in (w - held, w))
    steps = 4 * ceil(HIDDEN / 64 / 8)
    bounds = (1 + 2.0**-8) * (apart + ((steps + 1) * 2.0**-18 + 1.5625 * 2.0**-11) * size) + 2.0**-40
    length = np.linalg.norm(x.astype(np.float64)) * (1 + 2.0**-9) + HIDDEN**0.5 * 2.0**-30
    # The two sums take the columns in different orders: backwards, and in groups of 128.
    exact = np.cumsum((w * x)[:, ::-1], axis=1, dtype=F32)[:, -1]
    screened = (held * in_quanta(x)).reshape(len(w), -1, 128).sum(axis=2, dtype=F32).sum(axis=1, dtype=F32)
    return Screen(exact, screened, bounds * length + np.abs(screened) * 2.0**-21)


def test_the_integers_that_a_row_enters_as_are_part_of_the_bound() -> None:
    """The bound covers the rounding of x: here weights have no error, and x has small elements beside a large one."""
    x = np.random.default_rng(0).standard_normal(HIDDEN).astype(F32)
    x[::128] *= F32(1000)
    x = round_to(x, DType.BFLOAT16)
    w = np.tile(np.where(x < in_quanta(x), F32(-1), F32(1)) * F32(127 / 1024), (8, 1))
    screen = screen_with(w, x, DType.BFLOAT16)
    away, size = np.abs(screen.exact - screen.screened).max(), np.linalg.norm(w[0]) * np.linalg.norm(x)
    assert 10 * 2.0**-18 * size < away < screen.width.min()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_holds_and_is_not_far_off(kind: str, dtype: DType) -> None:
    closest = 0.0
    for seed in range(6):
        screen = screen_of(kind, 400, seed, dtype, follows_row=seed % 2 == 0)
        share = np.abs(screen.screened.astype(np.float64) - screen.exact) / screen.width
        closest = max(closest, float(share.max()))
        assert (share < 1).all()
    assert closest > (0.02 if kind != "tiny" or dtype is DType.FLOAT16 else 0.0)


@given(
    kind=st.sampled_from(KINDS), vocab=st.integers(40, 700), seed=st.integers(0, 2**20), follows_row=st.booleans(),
    dtype=st.sampled_from([DType.BFLOAT16, DType.FLOAT16]), teams=st.sampled_from([8, 24, 88]),
)  # fmt: skip
def test_what_is_left_out_cannot_be_sampled(
    kind: str, vocab: int, seed: int, follows_row: bool, dtype: DType, teams: int
) -> None:
    screen, nothing = screen_of(kind, vocab, seed, dtype, follows_row=follows_row), np.zeros(vocab, np.int64)
    for params in SAMPLINGS:
        logits, is_best = screen.rescored(params, teams), screen.exact == screen.exact.max()
        kept = keep_mask(screen.exact / F32(params.temperature), params) if params.temperature else is_best
        assert (logits[kept] == screen.exact[kept]).all(), params
        with np.errstate(invalid="ignore"):
            for position in range(3):
                arguments = (params, seed, position, nothing > 0, nothing)
                assert sample(logits, *arguments) == sample(screen.exact, *arguments), params


def test_few_tokens_are_left() -> None:
    """A screen leaves few tokens; one that left all of them would pass the test above."""
    for params, most in ((Sampling(), 40), (Sampling(temperature=1.0, top_k=5), 120)):
        screens = [screen_of("normal", 4000, seed, DType.BFLOAT16, follows_row=False) for seed in range(4)]
        left = [int(np.isfinite(screen.rescored(params, 88)).sum()) for screen in screens]
        assert 1 <= min(left) <= max(left) < most, left
