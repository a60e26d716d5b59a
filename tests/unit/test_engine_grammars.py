"""Sequences under a grammar on the scripted executor: any schedule gives the plain masked continuation."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import VOCAB, ScriptedExecutor, plain_continuation
from scripted_forms import END, Automaton, expected, limits, masked_continuation, request, tokens_of

from cpmrt.config import Sampling
from cpmrt.engine import Engine, Request, ThinkingBudget
from cpmrt.engine.step_log import StepLog, read_steps, replay
from cpmrt.errors import FormError, RequestError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Mask, Prefill, SlotResult

LIMITS = st.builds(
    limits, st.integers(1, 5), st.integers(1, 4), st.integers(2, 9),
    num_pages=st.sampled_from([0, 4 * 32]), page_size=st.just(4),
    certain_rows=st.sampled_from([0, 1, 3, 16, 64]), row_sizes=st.sampled_from([(), (2, 4, 64)]),
)  # fmt: skip
WANTED = st.tuples(
    st.lists(st.integers(0, 48), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(0, 5),
    st.integers(1, 60),
    st.sets(st.integers(0, 48), max_size=2),
)


@given(LIMITS, st.lists(WANTED, min_size=1, max_size=6))
def test_every_schedule_gives_the_masked_continuation(limits, wanted):
    executor = ScriptedExecutor(limits)
    engine = Engine(executor, prefix_cache=False)
    sequences = [engine.add(request(p, number, new=n, seed=s, stop=stop)) for p, number, s, n, stop in wanted]
    for seq, (prompt, number, seed, new, stop) in reversed(list(zip(sequences, wanted, strict=True))):
        assert tokens_of(engine, seq) == expected(prompt, number, seed, new, stop)
        if number is not None:
            assert seq.finish_reason == masked_continuation(prompt, number, seed, new, stop)[1]
    while executor.queue:
        executor.run_one()
    assert not executor.running, "every slot is released"
    assert executor.most_in_flight <= limits.run_ahead


@given(LIMITS, st.lists(WANTED, min_size=2, max_size=5), st.data())
def test_cancelled_and_stopped_sequences_leave_the_others_alone(limits, wanted, data):
    engine = Engine(ScriptedExecutor(limits), prefix_cache=False)
    sequences = [engine.add(request(p, number, new=n, seed=s, stop=stop)) for p, number, s, n, stop in wanted]
    victims = data.draw(st.sets(st.sampled_from(range(len(wanted))), min_size=1))
    for victim in victims:
        stream = engine.stream(sequences[victim])
        for _ in range(data.draw(st.integers(0, 5))):
            next(stream, None)
        if data.draw(st.booleans()) and sequences[victim].token_ids:
            engine.stop(sequences[victim], len(sequences[victim].token_ids))
        stream.close()
    for index, (prompt, number, seed, new, stop) in enumerate(wanted):
        if index not in victims:
            assert tokens_of(engine, sequences[index]) == expected(prompt, number, seed, new, stop)


@pytest.mark.parametrize("run_ahead", [1, 2, 4])
@pytest.mark.parametrize("company", [0, 1, 3])
def test_rows_of_certain_tokens_are_those_that_there_is_room_for(run_ahead, company):
    executor = ScriptedExecutor(limits(run_ahead, certain_rows=4))
    engine = Engine(executor, prefix_cache=False)
    for number in range(company):
        engine.add(request([number], number % 3 or None, seed=number, new=50))
    seq = engine.add(request([1, 2, 3], 7, seed=1))
    assert tokens_of(engine, seq) == expected([1, 2, 3], 7, 1, 40, ())
    steps = [step for step in executor.steps if isinstance(step, Decode) and step.certain]
    rows = [len(step.slots) + sum(map(len, step.certain)) for step in steps]
    assert rows and max(rows) == 4 and all(any(step.certain) for step in steps)
    assert all(len(step.certain) == len(step.masks) == len(step.slots) for step in steps)


@pytest.mark.parametrize("sizes", [(8, 16), ()], ids=str)
def test_a_step_is_not_made_larger_for_few_certain_tokens(sizes):
    """With fixed row sizes, a step of eight sequences is not enlarged for one to three certain tokens of one of
    them."""
    executor = ScriptedExecutor(limits(4, max_sequences=8, row_sizes=sizes))
    engine = Engine(executor, prefix_cache=False)
    sequences = [engine.add(request([number], None, seed=number, new=60)) for number in range(7)]
    sequences.append(engine.add(request([1, 2, 3], 7, seed=1, new=60)))
    tokens = [tokens_of(engine, seq) for seq in sequences]
    assert tokens[-1] == expected([1, 2, 3], 7, 1, 60, ())
    steps = [step for step in executor.steps if isinstance(step, Decode) and len(step.slots) == 8]
    brought = {sum(map(len, step.certain)) for step in steps}
    assert not (sizes and brought & {1, 2, 3}) and (sizes or brought & {1, 2, 3})


def test_other_sequences_decode_in_the_same_steps():
    """Sequences under a grammar hold nobody up: four sequences of 40 tokens take little more than 40 steps."""
    executor = ScriptedExecutor(limits(run_ahead=4))
    engine = Engine(executor, prefix_cache=False)
    sequences = [engine.add(request([n], None, seed=n)) for n in range(3)]
    sequences.append(engine.add(request([9], 2, seed=3, new=40)))
    for seq in sequences:
        tokens_of(engine, seq)
    decodes = [step for step in executor.steps if isinstance(step, Decode)]
    assert len(decodes) <= 45
    both = [step for step in decodes if step.masks]
    assert all(len(step.slots) == 4 for step in both[3:-3])


def test_a_sequence_runs_ahead_by_one_step():
    """The step after the one in flight is submitted before its mask is known."""
    executor = ScriptedExecutor(limits(run_ahead=4, max_sequences=1))
    unfilled = []
    submit = executor.submit

    def watched(step):
        if isinstance(step, Decode):
            unfilled.append(not step.masks[0].is_filled)
        return submit(step)

    executor.submit = watched
    engine = Engine(executor, prefix_cache=False)
    tokens_of(engine, engine.add(request([1], 3)))
    assert unfilled.count(True) > len(unfilled) / 2


def test_certain_tokens_take_fewer_steps():
    executor = ScriptedExecutor(limits())
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(request([1, 2, 3], 7, seed=1))
    tokens = tokens_of(engine, seq)
    steps = [step for step in executor.steps if isinstance(step, (Decode, Prefill))]
    assert len(steps) < 0.7 * len(tokens)


def test_logprobs_are_of_every_token():
    executor = ScriptedExecutor(limits())
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(replace(request([1, 2, 3], 7, seed=1), sampling=Sampling(logprobs=1)))
    results = list(engine.stream(seq))
    tokens = [token for result in results for token in result.token_ids]
    assert [entry.token_id for result in results for entry in result.logprobs] == tokens
    assert tokens == masked_continuation([1, 2, 3], 7, 1, 40)[0]
    assert not any(step.certain for step in executor.steps if isinstance(step, Decode))


@pytest.mark.parametrize("fails_at", [0, 1, 4, 9])
@pytest.mark.parametrize("run_ahead", [1, 4])
def test_a_mask_that_allows_nothing_ends_the_answer_with_its_error(fails_at, run_ahead):
    engine = Engine(ScriptedExecutor(limits(run_ahead)), prefix_cache=False)
    other = engine.add(request([5], None, new=30))
    seq = engine.add(request([1, 2, 3], 7, seed=1, fails_at=fails_at))
    tokens = []
    with pytest.raises(FormError, match="nothing is allowed"):
        for result in engine.stream(seq):
            tokens += result.token_ids
    right = masked_continuation([1, 2, 3], 7, 1, fails_at)[0] if fails_at else []
    assert tokens == seq.token_ids == right[: len(seq.token_ids)], "no wrong token"
    assert tokens_of(engine, other) == plain_continuation([5], 0, 30, set())


def test_an_executor_that_ignores_masks_is_found_out():
    class Ignorant(ScriptedExecutor):
        def _emit(self, running, mask=None):
            return super()._emit(running)

    class Strict(Automaton):
        def accept(self, token_ids):
            for token in token_ids:
                if token not in self.following():
                    raise FormError("not allowed")
                self.tokens.append(token)

    engine = Engine(Ignorant(limits()), prefix_cache=False)
    seq = engine.add(Request((1, 2, 3), Sampling(), 1, (), 40, matcher=lambda: Strict(7)))
    with pytest.raises(FormError):
        tokens_of(engine, seq)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 9))
def test_a_pause_in_the_form_changes_nothing(run_ahead, max_thinking, number):
    """A thinking budget that runs out where no thought is open pauses the sequence, which then goes on unchanged."""
    engine = Engine(ScriptedExecutor(limits(run_ahead)), prefix_cache=False)
    budget = ThinkingBudget(max_thinking, lambda token_ids: ())
    seq = engine.add(request([1, 2, 3], number, seed=1, thinking=budget))
    assert tokens_of(engine, seq) == masked_continuation([1, 2, 3], number, 1, 40)[0]


def test_a_grammar_hears_of_the_tokens_that_close_a_thought():
    class Free(Automaton):
        def _following(self, tokens):
            return list(range(END))

    matcher, budget = Free(0), ThinkingBudget(5, lambda token_ids: (40, 41))
    engine = Engine(ScriptedExecutor(limits()), prefix_cache=False)
    seq = engine.add(Request((1, 2, 3), Sampling(), 1, (), 12, matcher=lambda: matcher, thinking=budget))
    assert tokens_of(engine, seq) == matcher.tokens and matcher.tokens[5:7] == [40, 41]


def test_steps_with_masks_are_logged_and_replayed(tmp_path):
    log = io.StringIO()
    engine = Engine(ScriptedExecutor(limits()), StepLog(log), prefix_cache=False)
    sequences = [engine.add(request([n], n or None, seed=n, new=20)) for n in range(3)]
    for seq in sequences:
        tokens_of(engine, seq)
    path = tmp_path / "steps.jsonl"
    path.write_text(log.getvalue())
    steps = list(read_steps(path))
    assert any(isinstance(step, Decode) and any(step.masks) for step, _ in steps)
    for (step, result), (_, recorded) in zip(
        replay([step for step, _ in steps], ScriptedExecutor(limits())), steps, strict=True
    ):
        assert result == recorded, step


def test_an_executor_without_masks_refuses_grammars():
    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    with pytest.raises(RequestError, match="takes no schemas"):
        engine.add(request([1], 3))


def test_a_mask_is_plain_data():
    filled, heard = Mask(), []
    filled.on_fill = heard.append
    filled.fill(b"\x05")
    assert heard == [b"\x05"] and filled == Mask(b"\x05", is_filled=True) != Mask()
    assert repr(filled) == "Mask(2 tokens)" and SlotResult() == SlotResult()
    assert VOCAB > END


@given(
    st.builds(limits, st.integers(1, 5), st.integers(1, 4), st.integers(2, 9)),
    st.lists(WANTED, min_size=2, max_size=6),
    st.data(),
)
def test_nobody_waits_for_a_step_that_waits_for_its_mask(limits, wanted, data):
    """Every step in flight has its mask when a slot is lent or taken, as that may take long."""
    executor = ScriptedExecutor(limits)
    submit = executor.submit

    def watched(step):
        if isinstance(step, Admit):
            check_masks()
        return submit(step)

    def check_masks():
        masks = [mask for step, _ in executor.queue for mask in getattr(step, "masks", ()) if mask]
        assert all(mask.is_filled for mask in masks)

    executor.submit = watched
    engine = Engine(executor, prefix_cache=False)
    budget = ThinkingBudget(3, lambda token_ids: ())
    sequences = []
    for prompt, number, seed, new, stop in wanted:
        sequences.append(engine.add(request(prompt, number, new=new, seed=seed, stop=stop, thinking=budget)))
        loan = engine.borrow(5)
        for _ in range(data.draw(st.integers(0, 9))):
            engine.advance()
            if loan.slot >= 0:
                check_masks()
        engine.give_back(loan)
    for seq, (prompt, number, seed, new, stop) in zip(sequences, wanted, strict=True):
        assert tokens_of(engine, seq) == expected(prompt, number, seed, new, stop)
