"""What the prefix cache keeps, asked without an engine: which pages and states are found, and what they take."""

from __future__ import annotations

import pytest
from scripted import plain_continuation
from unit.test_prefix_cache import SIZE, PagedExecutor, ask, cached_tokens, paged_limits, tokens_of

from cpmrt.engine import Engine
from cpmrt.engine.prefix_cache import HeldPages, PrefixCache
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.executor import Decode, SlotResult, Step


def test_two_sequences_that_keep_the_same_state_use_one_snapshot() -> None:
    cache = PrefixCache(num_pages=6, page_size=SIZE, num_snapshots=2)
    text = range(5)
    held = [cache.acquire(text, 5), cache.acquire(text, 5)]
    for one in held:
        cache.keep(one, text, 5)
        cache.release(one)
    assert len(cache.acquire(range(10, 15), 5).borders) == 1, "in the other snapshot"
    assert cache.acquire(text, 5).num_cached == 4


def test_a_prompt_that_parts_from_an_earlier_one_is_resumed_at_its_own_end() -> None:
    engine, cached = Engine(PagedExecutor(paged_limits(max_context=40, prefill_chunk=16, num_snapshots=3))), []
    for own in (range(30, 39), range(40, 49), range(40, 52)):
        prompt = [*range(9), *own]
        seq = engine.add(ask(prompt, new=3))
        assert tokens_of(engine, seq) == plain_continuation(prompt, 0, 3, set())
        cached.append(seq.num_cached)
    assert cached == [0, 0, 16]


@pytest.mark.parametrize("answer_border", [0, 12])
def test_pages_behind_the_last_state_are_not_kept(answer_border: int) -> None:
    """Nobody can resume behind the last state. The one at a border that the answer does not reach is not kept."""
    cache = PrefixCache(num_pages=4, page_size=SIZE, num_snapshots=2)
    held = cache.acquire(range(6), 4 * SIZE)
    if answer_border:
        cache.snapshot_within_answer(held, answer_border)
    cache.keep(held, range(11), 10)
    cache.release(held)
    assert cached_tokens(cache) == {(0, 1, 2, 3)} and cache.pool.num_cached == 1


def test_no_snapshot_is_taken_where_nothing_is_kept() -> None:
    cache = PrefixCache(num_pages=4, page_size=SIZE, is_on=False, num_snapshots=2)
    assert cache.acquire(range(9), 9).borders == {}


@pytest.mark.parametrize(("length", "known"), [(3, 0), (4, 4), (7, 4), (8, 8), (12, 8)])
def test_the_tokens_in_known_pages_are_counted(length: int, known: int) -> None:
    cache = PrefixCache(num_pages=4, page_size=SIZE)
    cache.keep(cache.acquire(range(9), 9), range(9), 9)
    assert cache.num_known(range(length)) == known


def with_a_dropped_page() -> tuple[PrefixCache, HeldPages, HeldPages]:
    """Return a cache, a sequence whose text was dropped from the tree, and one that keeps its text in the page since.

    The first of them has computed the dropped text in a page of its own.
    """
    cache = PrefixCache(num_pages=6, page_size=2)
    first, second = cache.acquire((1, 2), 2), cache.acquire((1, 2), 4)
    for held in (first, second):
        cache.keep(held, (1, 2), 2)
    cache.release(first)
    third = cache.acquire((3,), 8)
    cache.keep(third, range(3, 11), 8)
    assert first.table[0] in third.table and cache.num_known((1, 2)) == 0
    return cache, second, third


def test_what_follows_a_dropped_page_is_found_though_the_page_has_another_text() -> None:
    cache, second, _ = with_a_dropped_page()
    cache.keep(second, (1, 2, 5, 6), 4)
    assert cache.num_known((1, 2, 5, 6)) == 4


def test_the_release_of_a_dropped_text_does_not_count_as_use_of_the_page() -> None:
    cache, second, third = with_a_dropped_page()
    cache.release(third)
    before = list(cache.pool._cached)
    cache.release(second)
    assert list(cache.pool._cached) == before


def test_an_answer_whose_step_failed_is_not_kept() -> None:
    """Where logits were not finite, the pages of the answer may hold such values too."""

    class Overflowing(PagedExecutor):
        def _run(self, step: Step) -> list[SlotResult]:
            results = super()._run(step)
            return [SlotResult(non_finite=True)] if isinstance(step, Decode) and len(self.steps) > 20 else results

    engine = Engine(Overflowing(paged_limits(prefill_chunk=16)), prefix_cache="fast")
    seq = engine.add(ask(range(6), new=24))
    with pytest.raises(NonFiniteLogitsError):
        tokens_of(engine, seq)
    assert len(seq.token_ids) > 2 * SIZE and engine.cache is not None
    assert engine.cache.num_known(seq.all_token_ids) == SIZE, "the full page of the prompt"
