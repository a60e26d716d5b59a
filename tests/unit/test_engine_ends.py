"""Sequences that are ended from outside, at a stop string or by a close: what is left of them, and what is not."""

from __future__ import annotations

import pytest
from scripted import Running, ScriptedExecutor, plain_continuation

from cpmrt.config import Sampling, TreeShape
from cpmrt.engine import Engine, Request
from cpmrt.engine.sequence import Phase
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.executor import ExecutorLimits, Release, SlotResult

PROMPT = (1, 2)


def request(new: int = 30) -> Request:
    return Request(PROMPT, Sampling(), 0, (), new)


def test_a_slot_is_free_only_if_nobody_waits_for_it() -> None:
    engine = Engine(ScriptedExecutor(ExecutorLimits(2, 64, 16)))
    found = [engine.has_free_slot]
    for _ in range(3):
        engine.add(request())
        found.append(engine.has_free_slot)
    assert found == [True, True, False, False]


def test_nothing_that_waits_to_be_read_is_left_behind_a_stop_string() -> None:
    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    seq = engine.add(request())
    while len(seq.token_ids) < 5:
        engine.advance()
    engine.stop(seq, 3)
    assert list(engine.stream(seq)) == []
    assert seq.token_ids == plain_continuation(list(PROMPT), 0, 3, set()) and seq.finish_reason == "stop"


def test_an_error_behind_a_stop_string_does_not_count() -> None:
    """The last tokens of a draft step complete a stop string, and the logits behind them are not finite."""

    class Overflowing(ScriptedExecutor):
        def _speculate(self, *arguments: object) -> SlotResult:
            return SlotResult(super()._speculate(*arguments).token_ids, non_finite=True)

    limits = ExecutorLimits(1, 64, 16, tree_shapes=(TreeShape.chain(5),))
    engine = Engine(Overflowing(limits, accuracy=1.0))
    seq = engine.add(request())
    while seq.failure is None:
        engine.advance()
    assert isinstance(seq.failure, NonFiniteLogitsError) and len(seq.token_ids) == 7
    engine.stop(seq, 4)
    assert list(engine.stream(seq)) == [] and (len(seq.token_ids), seq.finish_reason) == (4, "stop")


def test_a_listener_that_raises_leaves_no_token_behind_a_stop_string() -> None:
    def listen(step: object, result: object) -> None:
        if isinstance(step, Release):
            raise RuntimeError("the listener")

    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)), listen)
    seq = engine.add(request())
    while len(seq.token_ids) < 5:
        engine.advance()
    with pytest.raises(RuntimeError, match="the listener"):
        engine.stop(seq, 3)
    assert len(seq.token_ids) == 3 and list(engine.stream(seq)) == [] and engine.is_idle


def test_a_closed_engine_has_nothing_left_to_do() -> None:
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16, run_ahead=3))
    engine = Engine(executor)
    sequences = [engine.add(request()) for _ in range(2)]
    engine.borrow(8)
    while not sequences[0].token_ids:
        engine.advance()
    engine.close()
    num_steps = len(executor.steps)
    engine.advance()
    assert engine.is_idle and len(executor.steps) == num_steps
    assert [seq.finish_reason for seq in sequences] == ["cancelled"] * 2


def test_a_device_that_is_lost_ends_every_sequence_of_its_step() -> None:
    """The executor takes no release either. Each sequence has the error of the step, and slots and pages are free."""
    executor = ScriptedExecutor(ExecutorLimits(3, 64, 16, num_pages=3 * 16, page_size=4))
    engine = Engine(executor)
    sequences = [engine.add(request()) for _ in range(3)]
    while not all(seq.token_ids for seq in sequences):
        engine.advance()
    executor.closed = True  # it refuses whatever comes from now on
    with pytest.raises(AssertionError) as lost:
        engine.advance()
    assert [seq.failure for seq in sequences] == [lost.value] * 3 and not engine.running
    assert all(seq.phase is Phase.FINISHED for seq in sequences)
    assert sorted(engine.slots.free) == [0, 1, 2] and engine.cache is not None and engine.cache.pool.num_held == 0


def test_a_surplus_step_that_fails_is_no_error_of_an_answer_that_had_ended() -> None:
    class Fails(ScriptedExecutor):
        def _decode(self, running: Running, *arguments: object) -> SlotResult:
            if running.finished:
                raise RuntimeError("a fault")
            return super()._decode(running, *arguments)

    answer = plain_continuation(list(PROMPT), 0, 30, set())[:4]
    engine = Engine(Fails(ExecutorLimits(1, 64, 16, run_ahead=3)))
    seq = engine.add(Request(PROMPT, Sampling(), 0, (answer[-1],), 30))
    with pytest.raises(RuntimeError, match="a fault"):
        while True:
            engine.advance()
    assert [token for result in engine.stream(seq) for token in result.token_ids] == answer
    assert (seq.finish_reason, seq.failure) == ("stop", None)


def test_a_request_after_closing_is_refused_though_a_wait_was_interrupted() -> None:
    """The interrupted step stays in flight until the engine is closed; a request must not wait for it for ever."""

    class Interrupts(ScriptedExecutor):
        def run_one(self) -> None:
            if len(self.steps) == 4:
                raise KeyboardInterrupt
            super().run_one()

    engine = Engine(Interrupts(ExecutorLimits(1, 64, 16)))
    engine.add(request())
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.advance()
    engine.close()
    with pytest.raises(AssertionError):
        next(engine.stream(engine.add(request())))
