"""The state machine on a scripted executor: any schedule, chunking, run-ahead or draft gives the plain continuation."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor, next_token, plain_continuation

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request
from cpmrt.engine.checks import check_prompt
from cpmrt.engine.step_log import StepLog, read_steps, replay
from cpmrt.errors import ConfigError, ContextLengthError, DeviceError, RequestError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Prefill, Release


def request(prompt, *, new=8, seed=0, stop=()):
    return Request(tuple(prompt), Sampling(), seed, tuple(stop), new)


def tokens_of(engine, seq):
    return [token for result in engine.stream(seq) for token in result.token_ids]


@st.composite
def limits_of_executors(draw):
    """Draw limits of an executor: with or without drafts, known step costs and pages."""
    shapes = draw(st.sampled_from([(), *TREE_SHAPES]))
    seconds = st.floats(0.5, 4.0)
    return ExecutorLimits(
        max_sequences=draw(st.integers(1, 4)),
        max_context=64,
        prefill_chunk=draw(st.integers(1, 9)),
        run_ahead=draw(st.integers(1, 4)),
        tree_shapes=shapes,
        step_seconds=draw(st.one_of(st.just(()), st.tuples(*[seconds] * (len(shapes) + 1)))),
        num_pages=draw(st.sampled_from([0, 4 * 16])),
        page_size=4,
    )


LIMITS = limits_of_executors()
REQUESTS = st.builds(
    lambda prompt, new, seed, stop: (prompt, new, seed, stop),
    st.lists(st.integers(0, 49), min_size=1, max_size=30),
    st.integers(1, 30),
    st.integers(0, 5),
    st.sets(st.integers(0, 49), max_size=4),
)


@given(LIMITS, st.lists(REQUESTS, min_size=1, max_size=7), st.integers(0, 99), st.booleans(), st.booleans())
def test_every_schedule_gives_the_plain_continuation(limits, wanted, draft_seed, overshoot, adaptive):
    executor = ScriptedExecutor(limits, draft_seed, overshoot)
    engine = Engine(executor, prefix_cache=False, adaptive=adaptive)
    sequences = [engine.add(request(p, new=n, seed=s, stop=stop)) for p, n, s, stop in wanted]
    for seq, (prompt, new, seed, stop) in reversed(list(zip(sequences, wanted, strict=True))):
        results = list(engine.stream(seq))
        tokens = [token for result in results for token in result.token_ids]
        assert tokens == plain_continuation(prompt, seed, new, stop)
        assert [entry.token_id for result in results for entry in result.logprobs] == tokens
        assert seq.finish_reason == ("stop" if seq.token_ids[-1] in stop else "length")
    while executor.queue:
        executor.run_one()
    assert not executor.running, "every slot is released"
    assert executor.most_in_flight <= limits.run_ahead


@given(LIMITS, st.lists(REQUESTS, min_size=2, max_size=5), st.data())
def test_cancelled_sequences_leave_the_others_alone(limits, wanted, data):
    engine = Engine(ScriptedExecutor(limits), prefix_cache=False)
    sequences = [engine.add(request(p, new=n, seed=s, stop=stop)) for p, n, s, stop in wanted]
    victims = data.draw(st.sets(st.sampled_from(range(len(wanted))), min_size=1))
    for victim in victims:
        stream = engine.stream(sequences[victim])
        for _ in range(data.draw(st.integers(0, 3))):
            next(stream, None)
        stream.close()
        engine.finish(sequences[victim], "cancelled")
        assert sequences[victim].finish_reason is not None
    for index, (prompt, new, seed, stop) in enumerate(wanted):
        if index not in victims:
            assert tokens_of(engine, sequences[index]) == plain_continuation(prompt, seed, new, stop)


def test_run_ahead_never_submits_more_decodes_than_tokens_are_wanted():
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16, run_ahead=4))
    engine = Engine(executor)
    assert len(tokens_of(engine, engine.add(request([1, 2], new=3)))) == 3
    assert sum(isinstance(step, Decode) for step in executor.steps) == 2


def test_surplus_steps_after_an_end_token_give_nothing():
    prompt = [1, 2, 3]
    first = next_token(prompt, 0)
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16, run_ahead=4))
    engine = Engine(executor)
    assert tokens_of(engine, engine.add(request(prompt, new=20, stop=[first]))) == [first]
    assert tokens_of(engine, engine.add(request(prompt, new=2))) == plain_continuation(prompt, 0, 2, set())


def test_decode_steps_come_between_the_chunks_of_a_long_prompt():
    executor = ScriptedExecutor(ExecutorLimits(2, 64, 4))
    engine = Engine(executor)
    short = engine.add(request([1], new=20))
    stream = engine.stream(short)
    next(stream)
    engine.add(request(range(20), new=2))
    for _ in range(6):
        next(stream)
    kinds = [type(step) for step in executor.steps if isinstance(step, (Prefill, Decode))]
    assert not any(kinds[i] is kinds[i + 1] is Prefill for i in range(1, len(kinds) - 1)), kinds


@pytest.mark.parametrize("count", [1, 8])
def test_a_plain_step_takes_the_engine_few_calls(count):
    """A plain step makes few calls in the engine: each takes about 0.1 us of a small GPU's host, which is slow."""
    engine = Engine(ScriptedExecutor(ExecutorLimits(8, 200, 64, 4)), prefix_cache=False)
    for _ in range(count):
        engine.add(request([1, 2], new=150))
    for _ in range(20):
        engine.advance()
    calls = list[str]()

    def note(frame, event, _):
        if event == "call" and "/cpmrt/engine/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    before = [len(seq.token_ids) for seq in engine.running]
    sys.setprofile(note)
    try:
        for _ in range(50):
            engine.advance()
    finally:
        sys.setprofile(None)
    assert [len(seq.token_ids) for seq in engine.running] == [number + 50 for number in before]
    assert len(calls) / 50 <= 40 + 10 * count, calls[: len(calls) // 50]


def test_times_are_those_to_the_first_token_and_from_there_to_the_last():
    seq = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16))).add(request([1, 2], new=9))
    assert (seq.stats.prefill_s, seq.stats.decode_s) == (0, 0)
    assert (seq.stats.prefill_tokens_per_s, seq.stats.decode_tokens_per_s) == (0, 0)
    seq.added_at, seq.first_token_at, seq.last_token_at = 10.0, 12.0, 15.0
    seq.token_ids += [3, 4, 5, 6]
    assert (seq.stats.prefill_s, seq.stats.decode_s) == (2, 3)
    assert (seq.stats.prefill_tokens_per_s, seq.stats.decode_tokens_per_s) == (1, 1)


def test_sequences_decode_in_one_step():
    executor = ScriptedExecutor(ExecutorLimits(3, 64, 16))
    engine = Engine(executor)
    sequences = [engine.add(request([n], new=5)) for n in range(3)]
    for seq in sequences:
        tokens_of(engine, seq)
    assert (Decode(slots=(0, 1, 2)) in executor.steps) and isinstance(executor.steps[-1], Release)


@pytest.mark.parametrize(("prompt", "new", "error"), [
    ([], 4, RequestError),
    ([1] * 60, 5, ContextLengthError),
    ([1] * 65, 1, ContextLengthError),
])  # fmt: skip
def test_requests_that_cannot_run_are_refused_before_any_step(prompt, new, error):
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16))
    with pytest.raises(error, match="expected at"):
        Engine(executor).add(request(prompt, new=new))
    assert not executor.steps


def test_a_request_that_fills_the_context_exactly_runs():
    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    assert len(tokens_of(engine, engine.add(request([1] * 60, new=4)))) == 4


def test_a_prompt_that_is_only_read_may_fill_the_context():
    check_prompt([1] * 64, 64)
    with pytest.raises(ContextLengthError, match="65"):
        check_prompt([1] * 65, 64)
    with pytest.raises(RequestError, match="empty"):
        check_prompt([], 64)


class FailsOnce(ScriptedExecutor):
    """An executor that raises at one submission, as an interrupt would."""

    def __init__(self, limits, fail_at):
        super().__init__(limits)
        self.fail_at = fail_at

    def submit(self, step):
        self.fail_at -= 1
        if self.fail_at == 0:
            raise KeyboardInterrupt
        return super().submit(step)


@pytest.mark.parametrize("fail_at", range(1, 7))
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_an_interrupted_step_ends_its_stream_and_nothing_else(fail_at, run_ahead):
    engine = Engine(FailsOnce(ExecutorLimits(1, 64, 2, run_ahead=run_ahead), fail_at))
    seq = engine.add(request([1, 2, 3], new=8))
    with pytest.raises(KeyboardInterrupt):
        tokens_of(engine, seq)
    assert seq.finish_reason == "cancelled"
    assert tokens_of(engine, engine.add(request([4, 5], new=6))) == plain_continuation([4, 5], 0, 6, set())


@pytest.mark.parametrize("fail_at", range(3, 9))
def test_an_interrupted_step_never_costs_another_sequence_a_token(fail_at):
    engine = Engine(FailsOnce(ExecutorLimits(2, 64, 8), fail_at))
    sequences = [engine.add(request([n], new=9)) for n in (1, 2)]
    for seq in sequences:
        try:
            tokens_of(engine, seq)
        except KeyboardInterrupt:
            assert seq.finish_reason == "cancelled"
    for seq, prompt in zip(sequences, ([1], [2]), strict=True):
        whole = plain_continuation(prompt, 0, 9, set())
        assert seq.token_ids == whole[: len(seq.token_ids)]
        assert seq.finish_reason == "cancelled" or seq.token_ids == whole


class FailsForEver(ScriptedExecutor):
    """A device that faults at one submission, or in one step, and answers nothing from then on."""

    def __init__(self, limits, fail_at, in_submit):
        super().__init__(limits)
        self.fail_at, self.in_submit, self.failing = fail_at, in_submit, 0

    def submit(self, step):
        if isinstance(step, Release):
            return super().submit(step)
        self.fail_at -= 1
        if self.fail_at <= 0 and self.in_submit:
            raise DeviceError("the GPU failed")
        pending = super().submit(step)
        return self if self.fail_at <= 0 and not isinstance(step, Admit) else pending

    def is_done(self):
        raise DeviceError("the GPU failed")

    wait = is_done


@pytest.mark.parametrize("in_submit", [False, True])
@pytest.mark.parametrize("fail_at", range(1, 11))
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_every_stream_ends_with_the_fault_of_a_step(fail_at, in_submit, run_ahead):
    engine = Engine(FailsForEver(ExecutorLimits(2, 64, 8, run_ahead=run_ahead), fail_at, in_submit))
    sequences = [engine.add(request([n], new=9)) for n in (1, 2, 3)]
    for seq in sequences:
        with pytest.raises(DeviceError, match="the GPU failed"):
            tokens_of(engine, seq)
        assert seq.finish_reason == "cancelled" and len(seq.token_ids) < 9
    engine.close()


class RefusesSeedOne(ScriptedExecutor):
    """An executor that does not take every valid request."""

    def submit(self, step):
        if isinstance(step, Admit) and step.seed == 1:
            raise RequestError("too many stop token ids")
        return super().submit(step)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_refused_request_is_the_business_of_its_stream(order):
    engine = Engine(RefusesSeedOne(ExecutorLimits(2, 64, 8)))
    sequences = [engine.add(request([seed], seed=seed)) for seed in range(3)]
    for seed in order:
        if seed == 1:
            with pytest.raises(RequestError, match="too many"):
                tokens_of(engine, sequences[1])
        else:
            assert tokens_of(engine, sequences[seed]) == plain_continuation([seed], seed, 8, set())


def test_a_request_after_closing_does_not_wait_for_a_slot():
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16))
    engine = Engine(executor)
    held = engine.stream(engine.add(request([1])))
    next(held)
    engine.close()
    with pytest.raises(AssertionError):
        tokens_of(engine, engine.add(request([2])))


def test_closing_the_engine_cancels_what_runs_and_what_waits():
    executor = ScriptedExecutor(ExecutorLimits(1, 64, 16, run_ahead=2))
    engine = Engine(executor)
    running, waiting = engine.add(request([1])), engine.add(request([2]))
    stream = engine.stream(running)
    next(stream)
    engine.close()
    engine.close()
    stream.close()
    assert executor.closed and running.finish_reason == waiting.finish_reason == "cancelled"


@given(LIMITS, st.lists(REQUESTS, min_size=1, max_size=4))
def test_a_step_log_replays(tmp_path_factory, limits, wanted):
    text = io.StringIO()
    engine = Engine(ScriptedExecutor(limits, draft_seed=3), StepLog(text), prefix_cache=False)
    for seq in [engine.add(request(p, new=n, seed=s, stop=stop)) for p, n, s, stop in wanted]:
        tokens_of(engine, seq)
    path = tmp_path_factory.mktemp("log") / "steps.jsonl"
    path.write_text(text.getvalue())
    recorded = list(read_steps(path))
    replayed = list(replay((step for step, _ in recorded), ScriptedExecutor(limits, draft_seed=3)))
    assert replayed == recorded


@pytest.mark.parametrize("line", [
    "", "[]", "{}", "no json", '{"step": "Decode"}', '{"step": "Fly", "result": []}',
    '{"step": "Admit", "slot": 0, "sampling": 1, "seed": 0, "max_new_tokens": 1, "stop_token_ids": [], "result": []}',
])  # fmt: skip
def test_a_line_that_is_no_step_is_named(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        list(read_steps(path))


def test_a_logit_bias_that_the_executor_cannot_do_is_refused():
    biased = Request((1,), Sampling(logit_bias=((3, 1.0),)), 0, (), 2)
    with pytest.raises(RequestError, match="logit_bias"):
        Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16))).add(biased)
    assert Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16, max_logit_bias=1))).add(biased).request is biased


class FailsWhileRunning(ScriptedExecutor):
    """An executor whose fifth step is submitted and then fails while it runs."""

    def run_one(self):
        if len(self.steps) == 4:
            step, _ = self.queue.popleft()
            self.running[step.slots[0]].finished = True  # its progress is unknown
            raise RuntimeError("a fault")
        super().run_one()


def test_a_step_that_fails_while_it_runs_is_not_waited_for_again():
    engine = Engine(FailsWhileRunning(ExecutorLimits(1, 64, 16)))
    seq = engine.add(request([1, 2], new=9))
    with pytest.raises(RuntimeError, match="a fault"):
        tokens_of(engine, seq)
    assert seq.finish_reason == "cancelled"
    assert tokens_of(engine, engine.add(request([4], new=3))) == plain_continuation([4], 0, 3, set())
