"""Steps that fail and waits that are interrupted, at random: whoever is not hit gets the answer of a request alone."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_forms import limits, masked_continuation, request
from unit.test_engine_drafted_forms import drafting, steady
from unit.test_engine_schedules import Play, alone
from unit.test_prefix_cache import PagedExecutor

from cpmrt.config import TreeShape
from cpmrt.engine import Engine, guide, loops
from cpmrt.engine.sequence import Phase
from cpmrt.errors import CpmrtError, RequestError
from cpmrt.executor import Admit, Decode, Prefill, Release, Speculate, StepResult


class Fault(CpmrtError):
    """The error of a step."""


class Lost:
    """The pending of a step whose result is lost."""

    def __init__(self, pending):
        self.pending, self.is_done = pending, pending.is_done

    def wait(self) -> StepResult:
        self.pending.wait()
        raise Fault("lost")


class Interrupted:
    """A pending whose first wait is interrupted, before the step is begun or once it is done."""

    def __init__(self, pending, *, is_begun):
        self.pending, self.is_done = pending, pending.is_done
        self.is_begun, self.is_interrupted = is_begun, False

    def wait(self) -> StepResult:
        if self.is_interrupted:
            return self.pending.wait()
        self.is_interrupted = True
        if self.is_begun:
            self.pending.wait()
        raise KeyboardInterrupt


class FaultyExecutor(PagedExecutor):
    """An executor whose submissions and steps fail at random, except Releases, and whose waits are interrupted."""

    def __init__(self, limits, random: Random):
        super().__init__(limits, random.randrange(99))
        self.fate = random

    def submit(self, step):
        draw, is_release = self.fate.random(), isinstance(step, Release)
        if draw < 0.03 and not is_release:
            errors = [Fault("not submitted"), KeyboardInterrupt(), *[RequestError("refused")] * isinstance(step, Admit)]
            raise self.fate.choice(errors)
        pending = super().submit(step)
        if draw > 0.98:
            return Interrupted(pending, is_begun=draw > 0.99)
        is_lost = draw > 0.96 and isinstance(step, (Prefill, Decode, Speculate))
        return Lost(pending) if is_lost else pending


class FaultyPlay(Play):
    """A play in which steps fail, waits are interrupted, and the listener raises."""

    def __init__(self, random: Random):
        super().__init__(random)
        self.executor = FaultyExecutor(self.limits, random)
        reuse, self.num_interrupts = random.choice([True, "fast", False]), 0

        def listen(step, result):
            if random.random() < 0.01:
                raise Fault("the listener")

        self.engine = Engine(self.executor, listen, prefix_cache=reuse)
        self.watch()

    def whatever_happens(self, call, *arguments) -> None:
        try:
            call(*arguments)
        except KeyboardInterrupt:
            self.num_interrupts += 1
        except CpmrtError:
            pass

    def kill(self, seq) -> None:
        if self.random.random() < 0.5 and seq.token_ids:
            self.whatever_happens(self.engine.stop, seq, len(seq.token_ids))
        else:
            self.whatever_happens(self.engine.finish, seq, "cancelled")
        assert seq.phase is Phase.FINISHED and seq.finish_reason is not None
        self.killed.append(seq)

    def advance(self) -> None:
        self.whatever_happens(self.engine.advance)
        for seq in [seq for seq in self.live if seq.phase is Phase.FINISHED]:
            self.live.remove(seq)
            self.ended.append(seq)

    def check(self) -> None:
        while not self.engine.is_idle:
            self.advance()
        num_cut = 0
        for seq in (*self.ended, *self.killed):
            tokens, reason, failure = alone(seq.request, int(bool(self.limits.certain_rows)))
            assert seq.token_ids == tokens[: len(seq.token_ids)]
            assert seq.failure is None or seq.finish_reason == "cancelled", "an error behind the end is nobody's"
            assert seq in self.killed or self.heard[seq] == (len(seq.token_ids), seq.finish_reason)
            is_hit = seq in self.killed or isinstance(seq.failure, (Fault, RequestError))
            if not is_hit and seq.finish_reason == "cancelled" and seq.failure is None:
                num_cut += 1  # by an interrupt
            elif not is_hit:
                assert (seq.finish_reason, type(seq.failure)) == (reason, failure)
                assert failure is not type(None) or seq.token_ids == tokens
        assert num_cut <= self.num_interrupts * self.limits.max_sequences
        self.check_that_nothing_is_left()

    def check_that_nothing_is_left(self) -> None:
        while self.executor.queue:
            self.executor.run_one()
        assert not self.engine.running and not self.executor.running
        assert sorted(self.engine.slots.free) == list(range(self.limits.max_sequences))
        assert self.engine.cache.pool.num_held == 0
        if snapshots := self.engine.cache._snapshots:
            numbers = sorted([*snapshots._free, *snapshots._kept.values()])
            assert numbers == list(range(self.limits.num_snapshots))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 0, 2, 8]))
@examples(100)
def test_faults_and_interrupts_cost_nobody_else_a_token(seed, num_steady):
    with patch.object(guide, "_STEADY_TOKENS", num_steady), patch.object(loops, "LEAST_TOKENS", 24):
        play, turns = FaultyPlay(Random(seed)), 0
        while not play.is_over:
            turns += 1
            assert turns < 20_000, "it hangs"
            play.turn()
        play.check()


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupted_wait_leaves_the_tree_behind_it_without_masks(number, is_begun):
    """Where one tree follows another, its masks depend on the tokens of that, which an interrupted wait leaves unread.
    """
    executor = drafting(limits(4, max_sequences=1, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: 7})
    submit, trees = executor.submit, []

    def submitted(step):
        pending = submit(step)
        if isinstance(step, Speculate):
            trees.append(step)
            if len(trees) == number + 1:
                return Interrupted(pending, is_begun=is_begun)
        return pending

    executor.submit = submitted
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(request([1, 2, 3], 7, seed=1))
    with steady(0):
        with pytest.raises(KeyboardInterrupt):
            while True:
                engine.advance()
        assert trees[number].masks.bits is not None and all(tree.masks.bits is None for tree in trees[number + 1 :])
        while not engine.is_idle:
            engine.advance()
    assert seq.token_ids == masked_continuation([1, 2, 3], 7, 1, 40)[0] and seq.failure is None
