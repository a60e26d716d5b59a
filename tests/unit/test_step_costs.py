"""From how many certain tokens on a chunk of an answer pays on a GPU, by arithmetic with measured times."""

import pytest

from cpmrt.cuda.step.costs import min_forced

CHUNK, STEP = {True: 4.6, False: 5.3}, {True: 1.43, False: 3.9}
"""Milliseconds on an H200, MiniCPM4-8B in 4 and in 16 bits: a chunk of up to 128 tokens, a decode step of one row."""
STEP_OF_32 = 3.2
"""The same in 4 bits with 32 rows."""


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_chunk_takes_less_time_than_the_steps_it_saves(is_packed):
    fewest = min_forced(is_packed=is_packed, max_sequences=1)
    assert (fewest - 1) * STEP[is_packed] < CHUNK[is_packed] < fewest * STEP[is_packed], "one token less does not pay"


def test_a_chunk_gives_more_tokens_than_all_slots_lose():
    assert min_forced(is_packed=True, max_sequences=32) > 32 * CHUNK[True] / STEP_OF_32


def test_more_sequences_need_as_many_tokens_or_more():
    for is_packed in (True, False):
        found = [min_forced(is_packed=is_packed, max_sequences=number) for number in range(1, 65)]
        assert found == sorted(found) and found[-1] == 128
