"""Answers that are free until they say something, on the scripted executor: any schedule gives the same tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor, masked_token, next_token
from scripted_forms import Automaton, limits, masked_continuation, tokens_of
from unit.test_prefix_cache import PagedExecutor

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, ThinkingBudget
from cpmrt.engine.late_form import Bound
from cpmrt.errors import RequestError
from cpmrt.executor import Decode, ExecutorLimits, Prefill


class SecondMultiple:
    """A trigger that binds with the second multiple of `of`, or before that token if its predecessor was even."""

    def __init__(self, number, of):
        self.number, self.of, self.tokens = number, of, []

    def push(self, token):
        self.tokens.append(token)
        if sum(each % self.of == 0 for each in self.tokens) < 2 or token % self.of:
            return None
        return Bound(Automaton(self.number), is_kept=len(self.tokens) < 2 or self.tokens[-2] % 2 == 1)


def late_continuation(prompt, number, of, seed, new):
    """Return the tokens that any engine must produce, found by the shortest loop, and how many of them are free."""
    tokens, trigger = list(prompt), SecondMultiple(number, of)
    for _ in range(new):
        token = next_token(tokens, seed)
        bound = trigger.push(token)
        if bound is None or bound.is_kept:
            tokens.append(token)
        if bound is not None:
            break
    else:
        return tokens[len(prompt) :], new
    automaton, free = bound.matcher, len(tokens) - len(prompt)
    while len(tokens) - len(prompt) < new and not (len(tokens) - len(prompt) > free and automaton.is_complete):
        tokens.append(masked_token(tokens, seed, automaton.following()))
        automaton.accept(tokens[-1:])
    return tokens[len(prompt) :], free


def late_request(prompt, number, of, seed, new, **others):
    return Request(tuple(prompt), Sampling(), seed, (), new, trigger=lambda: SecondMultiple(number, of), **others)


WANTED = st.tuples(
    st.lists(st.integers(0, 48), min_size=1, max_size=20), st.integers(0, 9), st.integers(2, 9), st.integers(1, 60)
)
SHAPED = st.builds(
    lambda shapes, **others: limits(tree_shapes=shapes, **others),
    st.sampled_from([(), *TREE_SHAPES]), takes_tree_masks=st.booleans(),
    run_ahead=st.integers(1, 5), max_sequences=st.integers(1, 3), prefill_chunk=st.integers(2, 9),
)  # fmt: skip


@given(SHAPED, st.lists(WANTED, min_size=1, max_size=4))
def test_every_schedule_binds_at_the_same_token(limits, wanted):
    engine = Engine(ScriptedExecutor(limits), prefix_cache=False)
    sequences = [engine.add(late_request(*wish[:3], seed, wish[3])) for seed, wish in enumerate(wanted)]
    for seed, (seq, wish) in reversed(list(enumerate(zip(sequences, wanted, strict=True)))):
        assert tokens_of(engine, seq) == late_continuation(*wish[:3], seed, wish[3])[0]


def test_free_tokens_run_ahead_and_have_no_masks():
    executor = ScriptedExecutor(limits(run_ahead=4, max_sequences=1))
    engine = Engine(executor, prefix_cache=False)
    tokens = tokens_of(engine, engine.add(late_request([1, 2, 3], 9, 7, 5, 40)))
    whole, free = late_continuation([1, 2, 3], 9, 7, 5, 40)
    assert tokens == whole and 4 < free < len(whole)
    again = next(at for at, step in enumerate(executor.steps) if isinstance(step, Prefill) and step.mask is not None)
    assert not any(step.masks for step in executor.steps[:again] if isinstance(step, Decode))
    assert executor.most_in_flight == 4


@given(SHAPED, WANTED, st.integers(-2, 2), st.booleans())
def test_a_grammar_that_is_complete_with_its_trigger_ends_the_answer(limits, wish, spare, overshoot):
    """A grammar complete with its trigger ends the answer, also if the trigger is the last token there is room for.

    It does not if the trigger is behind that, where a step may have brought it nevertheless.
    """
    prompt, number, of, new = wish
    whole, tokens = Automaton(number), list(prompt)
    while not whole.is_complete:
        whole.accept(whole.following()[:1])
    while len(tokens) < len(prompt) + new and (len(tokens) == len(prompt) or tokens[-1] % of):
        tokens.append(next_token(tokens, 3))
    answer = tokens[len(prompt) :]

    class First(SecondMultiple):
        def push(self, token):
            return None if token % self.of else Bound(whole.fork(), is_kept=True)

    engine = Engine(ScriptedExecutor(limits, overshoot=overshoot), prefix_cache=False)
    room = max(len(answer) + spare, 1)
    seq = engine.add(Request(tuple(prompt), Sampling(), 3, (), room, trigger=lambda: First(number, of)))
    if answer[-1] % of == 0:
        assert tokens_of(engine, seq) == answer[:room]
        assert seq.finish_reason == ("stop" if room >= len(answer) else "length")


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_grammar_that_binds_before_the_first_token_leaves_a_token_to_prefill(length):
    """Where the first token is not kept, the prompt's last token is prefilled again, even if its page is full."""

    class AtOnce(SecondMultiple):
        def push(self, token):
            return Bound(Automaton(self.number), is_kept=False)

    engine = Engine(PagedExecutor(limits(num_pages=128, page_size=4)))
    prompt = tuple(range(length))
    seq = engine.add(Request(prompt, Sampling(), 3, (), 20, trigger=lambda: AtOnce(7, 1)))
    assert tokens_of(engine, seq) == masked_continuation(prompt, 7, 3, 20)[0]


@pytest.mark.parametrize("max_thinking", [1, 5])
def test_tokens_that_close_a_thought_are_looked_at_too(max_thinking):
    engine = Engine(ScriptedExecutor(limits()), prefix_cache=False)
    seen = []

    class Watching(SecondMultiple):
        def push(self, token):
            seen.append(token)

    budget = ThinkingBudget(max_thinking, lambda tokens: (41, 43))
    made = Request((1, 2), Sampling(), 0, (), 12, thinking=budget, trigger=lambda: Watching(1, 5))
    assert tokens_of(engine, engine.add(made)) == seen and seen[max_thinking : max_thinking + 2] == [41, 43]


def test_an_executor_without_masks_refuses_them():
    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    with pytest.raises(RequestError, match="takes no schemas"):
        engine.add(late_request([1], 3, 2, 0, 9))
