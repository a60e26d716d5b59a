"""Sampling against its definition: known answers of Philox, frequencies, filters by brute force, penalties by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cpmrt.config import Sampling
from cpmrt.log_probabilities import log_softmax
from cpmrt.reference.philox import gumbel, philox
from cpmrt.reference.sampling import biased, keep_mask, penalise, sample, token_logprobs

VOCAB = 24
LOGITS = arrays(np.float32, VOCAB, elements=st.floats(-30, 30, width=32))
TIED_LOGITS = arrays(np.float32, VOCAB, elements=st.sampled_from([np.float32(x) for x in (-2.0, 0.0, 0.5, 3.0)]))
FILTERS = st.builds(
    Sampling,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0.0, 1.0),
)


def draw(logits, params, seed=0, position=0):
    logits = np.asarray(logits, np.float32)
    return sample(logits, params, seed, position, np.zeros(len(logits), bool), np.zeros(len(logits), np.int32))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The vectors that Random123 publishes for philox4x32-10; the key's low word comes first."""
    words = philox(np.array([counter, (0, 0, 0, 1), counter], np.uint32), key)
    assert words.dtype == np.uint32
    assert tuple(words[0].tolist()) == tuple(words[2].tolist()) == expected


def test_gumbel_noise_is_word_by_word_what_the_docstring_says():
    words = philox(np.array([(0, 77, 0, 0), (1, 77, 0, 0)], np.uint32), 2**63 + 5).reshape(-1)
    uniform = (words[:7].astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(gumbel(2**63 + 5, 77, 7), -np.log(-np.log1p(-uniform)), rtol=1e-5, atol=1e-6)
    assert np.array_equal(gumbel(9, 3, 5), gumbel(9, 3, 4000)[:5])


def test_gumbel_noise_is_finite_and_differs():
    noise = [gumbel(seed, position, 4096) for seed in (0, 1, -1, 2**64 - 2) for position in (0, 1, 2**31)]
    assert all(np.isfinite(row).all() for row in noise)
    assert len({row.tobytes() for row in noise}) == len(noise)


def test_a_negative_seed_is_its_64_bit_pattern():
    assert np.array_equal(gumbel(-1, 0, 8), gumbel(2**64 - 1, 0, 8))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square of 5000 draws, with a fixed seed; 7 degrees of freedom stay below 24.3 in 999 of 1000 runs."""
    logits, count = np.array([1.0, 0.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.0], np.float32), 5000
    params = Sampling(temperature=temperature)
    drawn = [draw(logits, params, seed=1234, position=position) for position in range(count)]
    observed = np.bincount(drawn, minlength=8)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_seeds_are_as_random_as_positions():
    drawn = [draw(np.zeros(4), Sampling(temperature=1.0), seed=seed) for seed in range(2000)]
    assert ((np.bincount(drawn, minlength=4) - 500.0) ** 2 / 500.0).sum() < 16.3


def test_only_survivors_are_drawn():
    logits = np.array([3.0, 2.0, 1.0, 0.0, -1.0], np.float32)
    params = Sampling(temperature=3.0, top_k=2)
    assert {draw(logits, params, position=position) for position in range(300)} == {0, 1}


def kept_by_definition(logits, params):
    """Return the token ids that the filters keep by their definitions, in float64, and those close to a threshold."""
    kept, close = set(range(len(logits))), set()
    if 0 < params.top_k < len(logits):
        kept = {i for i in kept if sum(logits[j] > logits[i] for j in kept) < params.top_k}
    weights = {i: float(np.exp(np.float64(logits[i]) - float(logits.max()))) for i in kept}
    total = sum(weights.values())
    if params.top_p < 1.0:
        above = {i: sum(w for j, w in weights.items() if logits[j] > logits[i]) / total for i in kept}
        close |= {i for i in kept if abs(above[i] - params.top_p) < 1e-4}
        kept = {i for i in kept if above[i] < params.top_p}
    if params.min_p > 0.0:
        close |= {i for i in weights if abs(weights[i] - params.min_p) < 1e-4 * params.min_p}
        kept = {i for i in kept if weights[i] >= params.min_p}
    return kept, close


@given(st.one_of(LOGITS, TIED_LOGITS), FILTERS)
def test_filters_follow_their_definition(logits, params):
    expected, close = kept_by_definition(logits, params)
    actual = set(np.flatnonzero(keep_mask(logits, params)).tolist())
    assert actual - close == expected - close


@given(st.one_of(LOGITS, TIED_LOGITS), FILTERS)
def test_the_best_token_always_survives_and_ties_stay_together(logits, params):
    keep = keep_mask(logits, params)
    assert keep[logits == logits.max()].all()
    for value in np.unique(logits):
        assert len(set(keep[logits == value].tolist())) == 1


def test_top_k_keeps_ties_at_its_border():
    logits = np.array([1.0, 2.0, 1.0, 0.0, 1.0], np.float32)
    assert keep_mask(logits, Sampling(top_k=2)).tolist() == [True, True, True, False, True]
    assert keep_mask(logits, Sampling(top_k=1)).tolist() == [False, True, False, False, False]
    assert keep_mask(logits, Sampling(top_k=4)).tolist() == [True, True, True, False, True], "one less than there are"
    assert keep_mask(logits, Sampling(top_k=5)).all()


def test_top_p_keeps_the_token_that_reaches_it():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, count in ((0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.99, 4), (1.0, 4), (1e-6, 1)):
        assert keep_mask(logits, Sampling(top_p=top_p)).sum() == count


def test_top_p_takes_no_token_behind_the_one_that_reaches_it_exactly():
    logits = np.log(np.array([1.0, 0.5, 0.5], np.float32))
    assert np.exp(logits).tolist() == [1.0, 0.5, 0.5]
    assert keep_mask(logits, Sampling(top_p=0.5)).tolist() == [True, False, False]


def test_a_bias_is_added_before_the_penalties():
    logits = np.array([2.0, 1.6, 1.0], np.float32)
    assert biased(logits, ((0, 1.0), (2, -5.0), (3, 9.0))).tolist() == pytest.approx([3.0, 1.6, -4.0])
    params = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((0, 1.0),))
    assert sample(logits, params, 0, 0, np.array([True, False, False]), np.zeros(3, np.int32)) == 1


def test_top_p_counts_the_mass_that_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert keep_mask(logits, Sampling(top_p=0.5)).sum() == 2
    assert keep_mask(logits, Sampling(top_p=0.5, top_k=2)).sum() == 1


def test_min_p_is_relative_to_the_best():
    logits = np.log(np.array([0.5, 0.2, 0.06, 0.04], np.float32))
    assert keep_mask(logits, Sampling(min_p=0.1)).tolist() == [True, True, True, False]
    assert keep_mask(logits, Sampling(min_p=1.0)).tolist() == [True, False, False, False]


def test_a_min_p_below_float32_keeps_everything():
    with np.errstate(all="raise"):
        assert keep_mask(np.array([0.0, -80.0, -500.0], np.float32), Sampling(min_p=1e-300)).all()


@given(
    LOGITS,
    arrays(np.int32, VOCAB, elements=st.integers(0, 5)),
    arrays(np.bool_, VOCAB),
    st.floats(0.1, 10.0),
    st.floats(-5.0, 5.0),
    st.floats(-5.0, 5.0),
)
def test_penalties(logits, counts, in_prompt, repetition, presence, frequency):
    params = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    before = logits.copy()
    actual = penalise(logits, params, in_prompt | (counts > 0), counts)
    for token in range(VOCAB):
        value, count = float(before[token]), int(counts[token])
        if in_prompt[token] or count:
            value = value / repetition if value > 0 else value * repetition
        if count:
            value -= presence + frequency * count
        assert actual[token] == pytest.approx(value, rel=1e-5, abs=1e-4)
    assert np.array_equal(logits, before)


@given(LOGITS, FILTERS, st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1))
def test_a_draw_is_a_function_of_logits_seed_and_position(logits, params, seed, position):
    first = draw(logits, params, seed, position)
    draw(logits[::-1].copy(), params, seed + 1 if seed < 0 else seed - 1, position + 1)
    assert draw(logits, params, seed, position) == first
    assert keep_mask(logits / np.float32(params.temperature), params)[first]


@given(TIED_LOGITS, st.integers(0, 100))
def test_greedy_takes_the_lowest_id_of_a_tie(logits, position):
    params = Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2)
    best = min(i for i in range(VOCAB) if logits[i] == max(logits.tolist()))
    assert draw(logits, params, position, position) == best


def test_greedy_obeys_the_penalties():
    seen, counts = np.array([True, False, False]), np.array([0, 0, 0], np.int32)
    logits = np.array([2.0, 1.9, 0.0], np.float32)
    assert sample(logits, Sampling(repetition_penalty=1.5), 0, 0, seen, counts) == 1
    counts = np.array([1, 2, 0], np.int32)
    assert sample(logits, Sampling(frequency_penalty=2.0), 0, 0, seen, counts) == 0
    assert sample(logits, Sampling(presence_penalty=3.0), 0, 0, seen, counts) == 2


@given(LOGITS)
def test_logprobs_are_those_of_the_softmax(logits):
    logprobs = log_softmax(logits)
    assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)
    shifted = logits.astype(np.float64) - logits.max()
    np.testing.assert_allclose(logprobs, shifted - np.log(np.exp(shifted).sum()), rtol=1e-5, atol=1e-5)


@given(st.one_of(LOGITS, TIED_LOGITS), st.integers(1, 20), st.integers(0, VOCAB - 1))
def test_top_logprobs_are_sorted_and_hold_the_best(logits, count, token):
    result = token_logprobs(logits, token, count)
    assert len(result.top) == count
    best = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    assert [entry[0] for entry in result.top] == best[:count]
    assert all(above[1] >= below[1] for above, below in zip(result.top, result.top[1:], strict=False))
    assert result.logprob == pytest.approx(float(log_softmax(logits)[token]))
    assume(token in dict(result.top))
    assert dict(result.top)[token] == result.logprob


def test_logit_bias_comes_before_everything_else():
    logits = np.array([1.0, 3.0, 2.0, 0.0], np.float32)
    seen, counts = np.zeros(4, bool), np.zeros(4, np.int32)
    for bias, expected in (((1, -2.5),), 2), (((3, 100.0), (4, 200.0), (9, 5.0)), 3), ((), 1):
        assert sample(logits, Sampling(logit_bias=bias), 0, 0, seen, counts) == expected
    assert logits.tolist() == [1.0, 3.0, 2.0, 0.0], "the caller's logits stay as they are"
    params = Sampling(logit_bias=((0, 1.5),), repetition_penalty=2.0)
    seen[0] = True
    assert sample(logits, params, 0, 0, seen, counts) == 1, "the penalty divides the biased logit"
