"""Rounding between storage types, against NumPy's own conversions and exact arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.errors import ConfigError

FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=20).map(lambda xs: np.array(xs, np.float32))


@given(FLOATS)
def test_bfloat16_is_the_nearest_value_ties_to_even(values):
    words = from_float32(values, DType.BFLOAT16)
    assert words.dtype == np.uint16
    back = to_float32(words, DType.BFLOAT16)
    for value, word, rounded in zip(values, words, back, strict=True):
        if np.isnan(value):
            assert np.isnan(rounded)
            continue
        low = np.uint16(np.float32(value).view(np.uint32) >> 16)
        candidates = [w for w in (low, np.uint16(low + 1)) if (w & 0x7FFF) <= 0x7F80]
        exact = [float(to_float32(np.array([w], np.uint16), DType.BFLOAT16)[0]) for w in candidates]
        # The next value after the largest finite one counts as 2^128 when rounding to infinity.
        distance = [abs((e if np.isfinite(e) else np.copysign(2.0**128, e)) - float(value)) for e in exact]
        if np.isinf(value):
            assert rounded == value
            continue
        best = min(distance)
        nearest = [w for w, d in zip(candidates, distance, strict=True) if d == best]
        assert word in nearest and (len(nearest) == 1 or word % 2 == 0)


@given(FLOATS)
def test_float16_follows_numpy(values):
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(round_to(values, DType.FLOAT16), expected)


def test_float32_is_untouched():
    values = np.array([1.0, np.pi], np.float32)
    assert round_to(values, DType.FLOAT32) is values


@pytest.mark.parametrize(("name", "dtype"), [
    ("bf16", DType.BFLOAT16), ("torch.bfloat16", DType.BFLOAT16), ("fp16", DType.FLOAT16), ("float32", DType.FLOAT32),
])  # fmt: skip
def test_parse(name, dtype):
    assert DType.parse(name) is dtype


def test_parse_lists_what_is_known():
    with pytest.raises(ConfigError, match=r"float32 \| float16 \| bfloat16"):
        DType.parse("int8")
