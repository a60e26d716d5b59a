"""The loop guard against its definition, and answers that loop."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import scripted
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, ThinkingBudget, loops
from cpmrt.engine.loops import LEAST_TOKENS, MAX_PERIOD, LoopGuard
from cpmrt.executor import ExecutorLimits


def first_loop(tokens, repeats):
    """Return the number of tokens after which a text loops by definition, or None if it never does."""
    runs = [0] * (loops.MAX_PERIOD + 1)
    for index, token in enumerate(tokens):
        for period in range(1, min(index, loops.MAX_PERIOD) + 1):
            runs[period] = runs[period] + 1 if tokens[index - period] == token else 0
            if runs[period] + period >= max(repeats * period, loops.LEAST_TOKENS):
                return index + 1
    return None


def found_by_guard(tokens, repeats):
    guard = LoopGuard(repeats)
    return next((number for number, token in enumerate(tokens, 1) if guard.push(token)), None)


PIECES = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=90), st.integers(1, 12), st.integers(0, 5)),
    min_size=1, max_size=5,
)  # fmt: skip


@examples(60)
@given(PIECES, st.integers(2, 6))
def test_the_guard_fires_at_the_token_that_the_definition_names(pieces, repeats):
    """The guard fires at the defined token on runs of every kind, cut short and followed by other runs."""
    tokens = [token for run, times, cut in pieces for token in (run * times)[: len(run) * times - cut]]
    assert found_by_guard(tokens, repeats) == first_loop(tokens, repeats)


@pytest.mark.parametrize(("period", "repeats", "expected"), [
    (1, 4, LEAST_TOKENS), (3, 4, LEAST_TOKENS), (100, 4, 400), (MAX_PERIOD, 2, 2 * MAX_PERIOD),
    (MAX_PERIOD + 1, 2, None),
])  # fmt: skip
def test_when_a_period_counts(period, repeats, expected):
    text = [number * number % 1009 for number in range(period)] * (repeats + LEAST_TOKENS // period + 1)
    assert first_loop(text, repeats) == expected
    assert found_by_guard(text, repeats) == expected
    assert found_by_guard([9, 9, 5, *text], repeats) == (expected and expected + 3), "whatever came before"


def test_a_long_answer_costs_no_more_memory():
    guard = LoopGuard(4)
    for number in range(20_000):
        assert not guard.push(number * number % 10_007)
    assert len(guard._anchors) == MAX_PERIOD >= len(guard._places)


@contextmanager
def small_loops():
    """Count loops of twelve tokens while the body runs, and restore the scripted model's tokens afterwards."""
    least, plain = loops.LEAST_TOKENS, scripted.next_token
    loops.LEAST_TOKENS = 12
    try:
        yield
    finally:
        loops.LEAST_TOKENS, scripted.next_token = least, plain


def looping(start, period):
    plain = scripted.next_token
    return lambda tokens, seed: tokens[-period] if len(tokens) > start else plain(tokens, seed)


SHAPES = st.sampled_from([(), *TREE_SHAPES])


@examples(60)
@given(SHAPES, st.integers(1, 4), st.integers(0, 99), st.integers(6, 30), st.integers(1, 6), st.integers(3, 4))
def test_plain_and_drafted_answers_end_at_the_same_token(shapes, run_ahead, draft_seed, start, period, repeats):
    with small_loops():
        scripted.next_token = looping(start, period)
        whole = scripted.plain_continuation([1, 2, 3, 4, 5, 6], 7, 100, set())
        end = first_loop(whole, repeats)
        limits = ExecutorLimits(2, 128, 16, run_ahead=run_ahead, tree_shapes=shapes)
        engine = Engine(ScriptedExecutor(limits, draft_seed), prefix_cache=False)
        request = Request((1, 2, 3, 4, 5, 6), Sampling(), 7, (), 100, loop_repeats=repeats)
        seq, beside = engine.add(request), engine.add(Request((1, 2, 3, 4, 5, 6), Sampling(), 7, (), 100))
        assert [token for result in engine.stream(seq) for token in result.token_ids] == whole[:end]
        assert seq.finish_reason == "loop" and seq.stats.new_tokens == end
        assert [token for result in engine.stream(beside) for token in result.token_ids] == whole, "off unless asked"
        assert beside.finish_reason == "length"


def test_a_stop_token_and_the_limit_come_before_the_loop():
    with small_loops():
        scripted.next_token = looping(6, 1)
        whole = scripted.plain_continuation([1] * 6, 7, 40, set())
        end = first_loop(whole, 3)
        for stops, new, reason in (((), end, "length"), ((whole[-1],), 40, "stop")):
            seq = (engine := Engine(ScriptedExecutor(ExecutorLimits(1, 128, 16)))).add(
                Request((1,) * 6, Sampling(), 7, stops, new, loop_repeats=3)
            )
            list(engine.stream(seq))
            assert seq.finish_reason == reason


def test_the_tokens_that_close_a_thought_interrupt_a_loop():
    with small_loops():
        scripted.next_token = lambda tokens, seed: 9
        budget, text = ThinkingBudget(8, lambda token_ids: (40, 41)), [9] * 8 + [40, 41] + [9] * 40
        engine = Engine(ScriptedExecutor(ExecutorLimits(1, 128, 16)))
        seq = engine.add(Request((1,), Sampling(), 7, (), 50, loop_repeats=3, thinking=budget))
        assert [token for result in engine.stream(seq) for token in result.token_ids] == text[: first_loop(text, 3)]
        assert seq.finish_reason == "loop"


def test_a_loop_within_a_thought_closes_it_no_earlier():
    """The first loop raises the penalty and leaves the thought open, since its budget is not used up."""
    with small_loops():
        scripted.next_token = lambda tokens, seed: 9 if len(tokens) < 13 else len(tokens)
        engine = Engine(ScriptedExecutor(ExecutorLimits(1, 128, 16)))
        thinking = ThinkingBudget(20, lambda token_ids: (40, 41))
        seq = engine.add(Request((1,), Sampling(), 7, (), 24, loop_repeats=3, loop_penalty=2.0, thinking=thinking))
        tokens = [token for result in engine.stream(seq) for token in result.token_ids]
        assert tokens == [*[9] * 12, *range(13, 21), 40, 41, 23, 24] and seq.sampling.repetition_penalty == 2.0


@pytest.mark.parametrize("budget", [None, 12])
def test_a_second_loop_is_counted_from_the_end_of_the_first(budget):
    """The first loop, of twelve tokens, raises the penalty, also where a thinking budget is used up with it."""
    with small_loops():
        scripted.next_token = lambda tokens, seed: 9
        engine = Engine(ScriptedExecutor(ExecutorLimits(1, 128, 16)))
        thinking = ThinkingBudget(budget, lambda token_ids: ()) if budget else None
        seq = engine.add(Request((1,), Sampling(), 7, (), 50, loop_repeats=3, loop_penalty=2.0, thinking=thinking))
        assert [token for result in engine.stream(seq) for token in result.token_ids] == [9] * 24
        assert seq.finish_reason == "loop"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def greedy(**fields):
    return SamplingParams(max_new_tokens=300, temperature=0, ignore_eos=True, **fields)


@pytest.mark.parametrize("draft", [None, "lookup"])
def test_a_greedy_answer_that_loops(checkpoint, draft):
    with LLM(checkpoint, executor="reference", draft=draft) as llm:
        free = llm.generate("abc", greedy())
        end = first_loop(free.token_ids, 4)
        assert end is not None and len(free.token_ids) == 300
        ended = llm.generate("abc", greedy(loop_repeats=4, logprobs=1))
        assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:end], "loop")
        assert len(ended.logprobs) == end == ended.stats.new_tokens


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_loop_goes_on_under_a_higher_penalty(checkpoint, draft, prefix_cache):
    """After a loop the answer goes on as a prompt of everything so far does under the penalty, at the same
    positions."""
    with LLM(checkpoint, executor="reference", draft=draft, prefix_cache=prefix_cache) as llm:
        prompt = llm.tokenizer.encode("abc")
        free = llm.generate(prompt, greedy()).token_ids
        end = first_loop(free, 4)
        rest = SamplingParams(max_new_tokens=300 - end, temperature=0, ignore_eos=True, repetition_penalty=100)
        expected = (*free[:end], *llm.generate([*prompt, *free[:end]], rest).token_ids)
        again = first_loop(expected[end:], 4)
        answer = llm.generate(prompt, greedy(loop_repeats=4, loop_penalty=100, logprobs=2))
        assert answer.token_ids == (expected if again is None else expected[: end + again])
        assert answer.finish_reason == ("length" if again is None else "loop")
        assert expected[end:] != free[end:], "the penalty changes something"
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
        assert answer.stats.prompt_tokens == len(prompt) and answer.stats.new_tokens == len(answer.token_ids)
        assert llm.engine.is_idle
