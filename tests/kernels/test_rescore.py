"""rescore.cu after the screen: it gives the bits of linear_head for every token that sampling may choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from linear_cases import DIVISOR, bits
from screened_head_cases import GREEDY, Head, random_head, rows_for

from cpmrt.config import Sampling
from cpmrt.dtypes import DType
from cpmrt.reference.philox import gumbel
from cpmrt.reference.sampling import keep_mask

pytestmark = pytest.mark.gpu
DTYPES = [DType.BFLOAT16, DType.FLOAT16]
SAMPLED = [
    Sampling(temperature=0.8, top_k=20),
    Sampling(temperature=1.0, top_k=50, top_p=0.9),
    Sampling(temperature=1.3, min_p=0.05),
    Sampling(temperature=0.6, top_k=5, min_p=0.2),
    Sampling(temperature=0.7, top_k=12, min_p=0.1, top_p=0.8),
    Sampling(temperature=1e-3, top_k=3),
]
UNPROVEN = [
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.9, min_p=0.1),
    Sampling(repetition_penalty=1.1),
    Sampling(logprobs=2),
    Sampling(logit_bias=((3, 1.0),)),
]


def check(found: Any, whole: Any, sampling: Sampling) -> None:
    """Check that every token that sampling may choose has a logit, and that all logits other than -inf have the bits of
    `whole`."""
    is_there = found != -np.inf
    assert np.array_equal(bits(found[is_there]), bits(whole[is_there]))
    z, ours = (values / np.float32(sampling.temperature or 1.0) for values in (whole, found))
    kept = keep_mask(z, sampling) if sampling.temperature else whole == whole.max()
    assert is_there[kept].all()
    if sampling.temperature:
        with np.errstate(invalid="ignore"):
            assert np.array_equal(keep_mask(ours, sampling) & is_there, kept)
        noise = gumbel(3, 17, len(z))
        assert np.argmax(np.where(kept, z + noise, -np.inf)) == np.argmax(np.where(kept, ours + noise, -np.inf))
    else:
        assert np.argmax(found) == np.argmax(whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["small", "demo", "0.5B", "odd"])
def test_greedy_and_filtered_rows(cuda: Any, name: str, dtype: DType) -> None:
    head = random_head(cuda, name, dtype)
    for count in (1, 2, 5, 8, 9, 16, 23, 32):
        x = rows_for(head, count, seed=count)
        whole = head.whole(x)
        for first in range(0, 7, count):
            samplings: list[Any] = [(GREEDY, *SAMPLED)[(first + i) % 7] for i in range(count)]
            if count in (5, 23):
                samplings[2] = None
            found = head.rescored(x, samplings, is_counted=count != 9)
            for row, sampling in enumerate(samplings):
                if sampling is not None:
                    check(found[row], whole[row], sampling)
                    assert head.num_rescored < head.vocab


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_few_tokens_are_rescored(cuda: Any, dtype: DType) -> None:
    head = random_head(cuda, "0.5B", dtype)
    for sampling, most in ((GREEDY, 100), (Sampling(temperature=1.0, top_k=20), 2000)):
        for seed in range(5):
            x = rows_for(head, 1, seed)
            found = head.rescored(x, [sampling])
            check(found[0], head.whole(x)[0], sampling)
            assert head.num_rescored == np.isfinite(found).sum() < most


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("sampling", UNPROVEN, ids=str)
def test_what_needs_all_logits_gets_them(cuda: Any, sampling: Sampling, dtype: DType) -> None:
    head = random_head(cuda, "small", dtype)
    x = rows_for(head, 2)
    assert np.array_equal(bits(head.rescored(x, [sampling, GREEDY])), bits(head.whole(x)))


@pytest.mark.parametrize("count", [9, 16, 27])
def test_what_one_of_many_rows_needs_is_there_for_its_eight(cuda: Any, count: int) -> None:
    head = random_head(cuda, "small", DType.BFLOAT16)
    x, first = rows_for(head, count), (count - 1) // 8 * 8
    found, whole = head.rescored(x, [GREEDY] * (count - 1) + [UNPROVEN[0]]), head.whole(x)
    assert np.array_equal(bits(found[first:]), bits(whole[first:])) and head.num_rescored == head.vocab
    for row in range(first):
        check(found[row], whole[row], GREEDY)


@pytest.mark.parametrize("count", [1, 8, 32])
def test_a_device_of_few_multiprocessors(cuda: Any, count: int) -> None:
    """With few multiprocessors, so that a block takes tokens in many rounds, the logits have the same bits."""
    head = random_head(cuda, "0.5B", DType.BFLOAT16)
    head.plan = replace(head.plan, blocks=16)
    x, samplings = rows_for(head, count), [(GREEDY, *SAMPLED)[row % 7] for row in range(count)]
    whole = head.whole(x)
    for _ in range(3):
        found = head.rescored(x, samplings)
        for row, sampling in enumerate(samplings):
            check(found[row], whole[row], sampling)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_near_ties_equal_rows_and_outliers(cuda: Any, dtype: DType) -> None:
    random = np.random.default_rng(9)
    weight = random.standard_normal((20011, 512), np.float32) * np.float32(0.1)
    weight[1000:1300] = weight[7]  # equal rows: equal logits
    weight[2000:2100] = weight[8] + 1e-3 * random.standard_normal((100, 512), np.float32)
    weight[3000:3050, ::128] = 30  # 30 needs a scale for which all else rounds to zero
    weight[4000] = 0
    weight[5000] = 1e-30
    head = Head(cuda, weight, dtype)
    for at in (7, 8, 2050, 3010, 4000):
        x = head.weight[at : at + 1] * 9
        whole = head.whole(x)
        for sampling in (GREEDY, *SAMPLED):
            check(head.rescored(x, [sampling])[0], whole[0], sampling)
    zero = np.zeros((1, 512), np.float32)
    assert np.array_equal(bits(head.rescored(zero, [GREEDY])), bits(head.whole(zero)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_rescored_as_it_is(cuda: Any, value: float, dtype: DType) -> None:
    head = random_head(cuda, "small", dtype)
    x = rows_for(head, 3)
    x[1, 5] = value
    found, whole = head.rescored(x, [GREEDY] * 3), head.whole(x)
    assert np.array_equal(np.isnan(found[1]), np.isnan(whole[1])) and not np.isfinite(whole[1]).all()
    assert np.array_equal(bits(found[[0, 2]]), bits(whole[[0, 2]]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_among_many_rows(cuda: Any, value: float) -> None:
    head = random_head(cuda, "small", DType.BFLOAT16)
    x = rows_for(head, 24)
    x[17, 5] = value
    found, whole = head.rescored(x, [GREEDY] * 24), head.whole(x)
    assert np.array_equal(np.isnan(found[17]), np.isnan(whole[17])) and not np.isfinite(whole[17]).all()
    for row in (*range(17), *range(18, 24)):
        check(found[row], whole[row], GREEDY)


def test_the_interval_holds_every_logit(cuda: Any) -> None:
    for dtype in DTYPES:
        head = random_head(cuda, "odd", dtype)
        x = rows_for(head, 32)
        for count in (8, 32):
            head.rescored(x[:count], [GREEDY] * count)
            bounds = cuda.numpy(head.arrays["head_bounds"])
            norms, screened = (cuda.numpy(head.arrays[name])[:count] for name in ("head_norms", "screened_logits"))
            width = norms[:, None].astype(np.float64) * bounds / DIVISOR
            apart = np.abs(screened.astype(np.float64) - head.whole(x[:count]))
            assert (apart < width).all() and 0.05 < (apart[:8] / width[:8]).max() < 0.6


def test_a_head_whose_blocks_share_tiles(cuda: Any) -> None:
    """The bits match also for a head with few tiles a multiprocessor, of which linear_head splits K between two blocks,
    which decides its bits."""
    weight = np.random.default_rng(2).standard_normal((2629, 640), np.float32)
    head = Head(cuda, weight, DType.BFLOAT16)
    x = rows_for(head, 4)
    whole = head.whole(x)
    for _ in range(20):
        found = head.rescored(x, [GREEDY] * 4)
        for row in range(4):
            check(found[row], whole[row], GREEDY)
