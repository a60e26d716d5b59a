"""Random schedules of everything an engine does: each answer is what it is alone, and nothing is left behind.

Answers that are free, under a form, under one that fails or binds late; thoughts, loops, log-probabilities; stops,
cancels and loans in between; drafts for one and for several, with and without a policy.
"""

from __future__ import annotations

from math import inf
from random import Random
from unittest.mock import patch

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor
from scripted_forms import END, Automaton
from unit.test_engine_late_forms import SecondMultiple
from unit.test_prefix_cache import PagedExecutor

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, ThinkingBudget, guide, loops
from cpmrt.engine.sequence import Phase
from cpmrt.errors import CpmrtError
from cpmrt.executor import Decode, ExecutorLimits, Speculate


class Repeating(Automaton):
    """A grammar that allows mostly one repeating sequence of tokens, and a choice now and then."""

    def _following(self, tokens):
        if len(tokens) >= 70:
            return [END]
        if len(tokens) % 3:
            return [len(tokens) % 3]
        return [0, 5] if len(tokens) % 2 and len(tokens) < 60 else [0]


def drawn_request(random: Random, seed: int) -> Request:
    prompt = tuple(random.choice([7, 8]) for _ in range(random.randint(1, 20)))
    stop, new = tuple(random.sample(range(49), random.randint(0, 2))), random.randint(1, 60)
    number, fails_at, of, budget = (random.randint(*span) for span in ((0, 9), (0, 12), (2, 9), (1, 30)))
    kinds = (
        {}, {"matcher": lambda: Automaton(number)}, {"matcher": lambda: Automaton(number)},
        {"matcher": lambda: Automaton(number), "sampling": Sampling(logprobs=2)},
        {"matcher": lambda: Automaton(number, fails_at)},
        {"trigger": lambda: SecondMultiple(number, of), "stop_token_ids": ()},
        {"thinking": ThinkingBudget(budget, lambda tokens: () if 7 in tokens else (40, 41, 42))},
        {"matcher": lambda: Repeating(7), "stop_token_ids": (), "max_new_tokens": new + 30, "loop_repeats": 3,
         "loop_penalty": random.choice([1.0, 2.0])},
    )  # fmt: skip
    usual = {"sampling": Sampling(), "stop_token_ids": stop, "max_new_tokens": new}
    return Request(prompt, seed=seed, **usual | random.choice(kinds))


def drawn_limits(random: Random) -> ExecutorLimits:
    num_slots, shapes = random.randint(1, 4), random.choice([(), *TREE_SHAPES, *TREE_SHAPES])
    most = random.choice([(), tuple(random.randint(1, num_slots) for _ in shapes)]) if shapes else ()
    seconds, several = (), ()
    if shapes and random.random() < 0.7:
        seconds = (1.0, *(random.uniform(0.9, 2.5) for _ in shapes))
        several = tuple(
            (count, (1.0, *(random.uniform(1, 2.5) if can >= count else inf for can in most or (1,) * len(shapes))))
            for count in (2, 4)[: random.randint(0, 2)]
        )
    # Where sequences have states, certain tokens come one by one.
    snapshots = random.choice([0, 0, 1, 5])
    return ExecutorLimits(
        num_slots, 128, random.randint(2, 9), run_ahead=random.randint(1, 5), takes_masks=True, num_snapshots=snapshots,
        takes_tree_masks=random.random() < 0.7, certain_rows=0 if snapshots else random.choice([0, 1, 3, 16, 64]),
        row_sizes=random.choice([(), (2, 4, 64)]), tree_shapes=shapes, max_drafting=most, step_seconds=seconds,
        several_seconds=several, num_pages=num_slots * 32, page_size=4,
    )  # fmt: skip


def alone(request: Request, certain_rows: int):
    """Return the tokens, finish reason and error type of a request that runs alone and without drafts."""
    limits = ExecutorLimits(1, 128, 16, run_ahead=1, takes_masks=True, certain_rows=certain_rows)
    engine = Engine(ScriptedExecutor(limits), prefix_cache=False)
    seq = engine.add(request)
    try:
        for _ in engine.stream(seq):
            pass
    except CpmrtError:
        assert seq.failure is not None
    return seq.token_ids, seq.finish_reason, type(seq.failure)


class Play:
    """One engine with random requests, and the random actions on them."""

    def __init__(self, random: Random):
        self.random, self.limits = random, drawn_limits(random)
        self.executor = PagedExecutor(self.limits, random.randrange(99))
        self.engine = Engine(self.executor, prefix_cache=random.choice([True, "fast", False]))
        self.waiting = [drawn_request(random, number) for number in range(random.randint(1, 7))]
        self.live, self.ended, self.killed, self.loans = [], [], [], []
        self.heard = {}
        self.watch()

    def watch(self) -> None:
        """Note what whoever waits for a sequence finds when the engine says that there is something new."""

        def note(seq) -> None:
            self.heard[seq] = (len(seq.token_ids), seq.finish_reason)

        self.engine.on_news = note

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.live or self.loans)

    def turn(self) -> None:
        random, draw = self.random, self.random.random()
        if self.waiting and draw < 0.3:
            self.live.append(self.engine.add(self.waiting.pop(0)))
        elif draw < 0.34 and len(self.loans) < 2 and not self.is_over:
            self.loans.append(self.engine.borrow(random.randint(1, 10)))
        elif self.loans and draw < 0.42:
            self.engine.give_back(self.loans.pop(random.randrange(len(self.loans))))
        elif self.live and draw < 0.44:
            self.kill(self.live.pop(random.randrange(len(self.live))))
        else:
            self.advance()

    def kill(self, seq) -> None:
        """Stop a sequence at a token that its reader has not seen yet, or cancel it."""
        num_unread = sum(len(result.token_ids) for result in seq.outbox)
        if num_unread and self.random.random() < 0.5:
            kept = seq.token_ids[: self.random.randint(len(seq.token_ids) - num_unread + 1, len(seq.token_ids))]
            self.engine.stop(seq, len(kept))
            assert seq.token_ids == kept and seq.finish_reason == "stop"
        elif seq.phase is not Phase.FINISHED:
            self.engine.finish(seq, "cancelled")
        self.killed.append(seq)

    def advance(self) -> None:
        for seq in self.live:
            if self.random.random() < 0.9:
                seq.outbox.clear()
        try:
            self.engine.advance()
        except CpmrtError as error:
            assert any(seq.failure is error for seq in self.live)
        self.check_masks()
        for seq in [seq for seq in self.live if seq.phase is Phase.FINISHED]:
            self.live.remove(seq)
            self.ended.append(seq)

    def check_masks(self) -> None:
        """Check that trees have their masks when `advance` returns, and all steps have theirs while a slot is lent."""
        for step, _ in self.executor.queue:
            if isinstance(step, Speculate) and step.masks:
                assert step.masks.bits is not None
            if isinstance(step, Decode) and self.engine.slots.loans:
                assert all(mask is None or mask.is_filled for mask in step.masks)

    def check(self) -> None:
        certain = int(bool(self.limits.certain_rows))
        for seq in (*self.ended, *self.killed):
            tokens, reason, failure = alone(seq.request, certain)
            if seq in self.killed or failure is not type(None):
                assert seq.token_ids == tokens[: len(seq.token_ids)]
            if seq in self.ended:
                assert (seq.finish_reason, type(seq.failure)) == (reason, failure)
                assert failure is not type(None) or seq.token_ids == tokens
                assert self.heard[seq] == (len(seq.token_ids), seq.finish_reason)
            if seq.accepts is not None:
                assert all(count >= 0 for given in seq.accepts._given for count in given)
        while self.executor.queue:
            self.executor.run_one()
        assert not self.engine.running and not self.executor.running
        assert self.engine.cache.pool.num_held == 0
        if snapshots := self.engine.cache._snapshots:
            numbers = sorted([*snapshots._free, *snapshots._kept.values()])
            assert numbers == list(range(self.limits.num_snapshots)), "every snapshot is free or kept"


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(loops, "LEAST_TOKENS", 24)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 0, 2, 8]))
@examples(100)
def test_any_schedule_gives_the_answers_of_each_alone(seed, num_steady):
    play, turns = Play(Random(seed)), 0
    with patch.object(guide, "_STEADY_TOKENS", num_steady):
        while not play.is_over:
            turns += 1
            assert turns < 20_000, "it hangs"
            play.turn()
        play.check()


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
@examples(40)
def test_whatever_is_under_way_ends_with_close(seed, turns):
    play = Play(Random(seed))
    while turns and not play.is_over:
        turns -= 1
        play.turn()
    play.engine.close()
    for step, _ in play.executor.queue:
        if isinstance(step, Decode):
            assert all(mask is None or mask.is_filled for mask in step.masks)
        if isinstance(step, Speculate) and step.masks:
            assert step.masks.bits is not None
    assert all(seq.phase is Phase.FINISHED for seq in (*play.live, *play.ended, *play.killed))
