"""The engine with an executor that drafts: the steps it submits, its counts, and the room at a context's end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor, plain_continuation

from cpmrt.config import Sampling, TreeShape
from cpmrt.engine import Engine, Request
from cpmrt.engine.draft_policy import DraftPolicy
from cpmrt.engine.repeats import RepeatedText
from cpmrt.engine.sequence import Phase, Sequence
from cpmrt.engine.stats import AcceptCounts
from cpmrt.engine.transitions import apply, cut
from cpmrt.executor import Decode, ExecutorLimits, Release, SlotResult, Speculate, StepParts


def request(prompt, *, new):
    return Request(tuple(prompt), Sampling(), 0, (), new)


def tokens_of(engine, seq):
    return [token for result in engine.stream(seq) for token in result.token_ids]


def drafting(*shapes, **others):
    return ExecutorLimits(1, 64, 16, tree_shapes=shapes, **others)


def test_mean_accept_length_leaves_the_prefill_token_out():
    executor = ScriptedExecutor(drafting(TreeShape.chain(3)))
    engine = Engine(executor)
    seq = engine.add(request([1, 2], new=20))
    tokens_of(engine, seq)
    num_steps = sum(isinstance(step, Speculate) for step in executor.steps)
    stats = seq.stats
    assert stats.mean_accept_length == pytest.approx(19 / num_steps)
    assert (stats.speculative_steps, stats.speculative_tokens) == (num_steps, 19)


def test_tokens_behind_a_stop_string_are_taken_back_from_the_counts():
    engine = Engine(ScriptedExecutor(drafting(TreeShape.chain(5)), accuracy=1.0))
    seq = engine.add(request([1, 2], new=40))
    while len(seq.token_ids) < 13:  # one of the prefill, and six of each draft step
        engine.advance()
    engine.stop(seq, 9)
    assert (len(seq.token_ids), seq.stats.accept_histogram) == (9, (0, 1, 0, 0, 0, 1))
    assert seq.stats.accept_rates == (1.0,) * 5, "a step that was cut says nothing about what it might have given"


@pytest.mark.parametrize(("stops", "new", "reason"), [((6,), 9, "stop"), ((), 2, "length"), ((), 9, "cancelled")])
def test_logits_behind_the_end_of_an_answer_may_be_anything(stops, new, reason):
    seq = Sequence(Request((1, 2), Sampling(), 0, stops, new), phase=Phase.DECODE, slot=0, num_in_flight=1)
    gained = apply(seq, Speculate((0,), 0), SlotResult((5, 6), non_finite=True))
    assert gained.token_ids == (5, 6) and seq.finish_reason == reason
    assert (seq.failure is None) == (reason != "cancelled")


@pytest.mark.parametrize(("num_left", "histogram"), [(4, (0, 0, 1, 0, 0, 0)), (2, (0, 1, 0, 0, 0, 0))])
def test_tokens_that_no_draft_gave_are_not_taken_back_from_its_count(num_left, histogram):
    limits = drafting(TreeShape.chain(5))
    seq = Sequence(request([1, 2], new=40), accepts=AcceptCounts(limits), token_ids=[3, 4, 5, 6, 7], num_forced=2)
    seq.accepts.add(0, 3, is_last=True)
    cut(seq, num_left)
    assert (len(seq.token_ids), seq.stats.accept_histogram) == (num_left, histogram)


@pytest.mark.parametrize(("kept", "histogram"), [
    (8, (1, 0, 0, 0, 0, 1)), (12, (0, 0, 0, 0, 1, 1)), (13, (0, 0, 0, 0, 0, 2)),
])  # fmt: skip
def test_a_stop_string_leaves_the_last_step_what_it_needs(kept, histogram):
    engine = Engine(ScriptedExecutor(drafting(TreeShape.chain(5)), accuracy=1.0))
    seq = engine.add(request([1, 2], new=40))
    while len(seq.token_ids) < 13:
        engine.advance()
    engine.stop(seq, kept)
    assert seq.stats.accept_histogram == histogram


SHAPES = (TreeShape.chain(2), TreeShape(1, 8, 8), TreeShape.chain(4))
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()), max_size=12)


@given(STEPS, STEPS, st.integers(0, 4))
def test_accept_rates_are_those_of_their_definition(steps, others, num_cut):
    """The rate at a depth is the share of steps that accepted a token there, of those that might have: they accepted
    its parent, have a shape that goes so deep, and were not ended by the end of the text."""
    limits, counted = ExecutorLimits(1, 64, 16, tree_shapes=SHAPES), list[tuple[int, int, bool]]()
    total = AcceptCounts(limits)
    for part in (steps, others):
        counts = AcceptCounts(limits)
        part = [(shape, min(given, SHAPES[shape].max_emitted), is_last) for shape, given, is_last in part]
        for step in part:
            counts.add(step[0], step[1], is_last=step[2])
        if part and num_cut:
            counts.take_back(num_cut)
            part[-1] = (part[-1][0], max(part[-1][1] - num_cut, 1), True)
        counts.pass_by()
        counts.take_back(1)
        total.merge(counts)
        counted += part
    expected = list[float]()
    for depth in range(1, 5):
        able = [step for step in counted if SHAPES[step[0]].max_emitted > depth and step[1] >= depth]
        tried = [given for _, given, is_last in able if given > depth or not is_last]
        if tried:
            expected.append(sum(given > depth for given in tried) / len(tried))
    assert total.rates == pytest.approx(tuple(expected))
    assert total.num_steps == len(counted) and total.num_tokens == sum(given for _, given, _ in counted)
    assert total.histogram == [sum(given == number for _, given, _ in counted) for number in range(1, 6)]


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9])
def test_counts_of_draft_steps_are_those_of_their_results(accuracy):
    shapes, results = (TreeShape.chain(4), TreeShape(1, 8, 8)), []
    limits = drafting(*shapes, step_seconds=(1.0, 1.3, 1.1))
    engine = Engine(ScriptedExecutor(limits, accuracy=accuracy), lambda step, result: results.append((step, result)))
    seq = engine.add(request([1, 2], new=50))
    tokens_of(engine, seq)
    steps = [
        (shapes[step.shape], len(result.slots[0].token_ids)) for step, result in results if isinstance(step, Speculate)
    ]
    stats = seq.stats
    assert stats.accept_histogram == tuple(sum(given == number for _, given in steps) for number in range(1, 6))
    for depth, rate in enumerate(stats.accept_rates, 1):
        tried = [given for shape, given in steps if shape.max_emitted > depth <= given]
        if isinstance(results[-2][0], Speculate) and steps[-1][1] == depth:
            tried.pop()  # the very last step (before the Release) stopped because there was enough
        assert rate == pytest.approx(sum(given > depth for given in tried) / len(tried))


def test_the_parts_of_a_step_are_the_executors_or_none():
    shapes = (TreeShape.chain(2), TreeShape.chain(3))
    for parts, expected in (((), None), ((StepParts(0.001, 0.002, 0.0005), StepParts(1, 1, 1)), (1.0, 2.0, 0.5))):
        engine = Engine(ScriptedExecutor(drafting(*shapes, step_parts=parts)))
        seq = engine.add(request([1], new=9))
        tokens_of(engine, seq)
        stats = seq.stats
        found = (stats.draft_ms, stats.verify_ms, stats.rest_ms)
        assert found == (pytest.approx(expected) if expected else (None,) * 3)


def test_without_drafts_there_is_nothing_to_count():
    engine = Engine(ScriptedExecutor(ExecutorLimits(1, 64, 16)))
    seq = engine.add(request([1], new=9))
    tokens_of(engine, seq)
    stats = seq.stats
    assert (stats.mean_accept_length, stats.accept_histogram, stats.accept_rates) == (None, (), ())


@pytest.mark.parametrize(("seconds", "adaptive"), [((), True), ((1.0, 1.9, 1.0), False)])
def test_the_first_shape_is_taken_where_costs_are_unknown_or_the_user_wants_it(seconds, adaptive):
    executor = ScriptedExecutor(drafting(TreeShape(), TreeShape.chain(1), step_seconds=seconds), accuracy=0.0)
    engine = Engine(executor, adaptive=adaptive)
    tokens_of(engine, engine.add(request([1], new=30)))
    decodes = {step for step in executor.steps if isinstance(step, (Decode, Speculate))}
    assert decodes == {Speculate((0,), 0)}


@pytest.mark.parametrize("run_ahead", [1, 4])
def test_drafts_that_fail_cost_little(run_ahead):
    seconds = (1.5, 2.2, 1.9)
    limits = ExecutorLimits(1, 1024, 16, run_ahead, tree_shapes=(TreeShape(), TreeShape(1, 8, 8)), step_seconds=seconds)
    executor = ScriptedExecutor(limits, accuracy=0.0)
    engine = Engine(executor)
    assert tokens_of(engine, engine.add(request([1], new=500))) == plain_continuation([1], 0, 500, set())
    steps = [step for step in executor.steps if isinstance(step, (Decode, Speculate))]
    assert any(isinstance(step, Speculate) for step in steps)
    cost = sum(seconds[step.shape + 1] if isinstance(step, Speculate) else seconds[0] for step in steps)
    assert cost <= 499 * 1.5 * 1.03


def test_an_answer_begins_with_what_the_one_before_gave():
    """Where drafts fail the first answer finds it out, and later answers begin with plain steps and try one draft now
    and then."""
    limits = drafting(TreeShape(), step_seconds=(1.5, 2.2))
    executor = ScriptedExecutor(limits, accuracy=0.0)
    engine, num_tried = Engine(executor), []
    for _ in range(10):
        begin = len(executor.steps)
        tokens_of(engine, engine.add(request([1], new=21)))
        num_tried.append(sum(isinstance(step, Speculate) for step in executor.steps[begin:]))
    assert num_tried[0] > 2 and max(num_tried[1:]) == 1 and 2 <= sum(num_tried[1:]) <= 4


def test_several_sequences_decode_plainly_and_the_last_one_is_drafted_for():
    executor = ScriptedExecutor(ExecutorLimits(2, 64, 16, tree_shapes=(TreeShape(),)))
    engine = Engine(executor)
    first, second = engine.add(request([1], new=8)), engine.add(request([2], new=40))
    tokens_of(engine, first)
    together = executor.steps[: executor.steps.index(Release(first.slot))]
    tokens_of(engine, second)
    assert Decode((0, 1)) in together and {step.slots for step in together if isinstance(step, Speculate)} <= {(0,)}
    alone = executor.steps[len(together) :]
    assert Speculate((second.slot,), 0) in alone and not any(isinstance(step, Decode) for step in alone)


@pytest.mark.parametrize("num_sequences", [2, 3, 5])
@pytest.mark.parametrize("run_ahead", [1, 3])
def test_an_executor_that_drafts_for_several_takes_them_in_one_step(num_sequences, run_ahead):
    """Up to three sequences are drafted for in one step, more decode plainly, and the tokens are those of plain
    decoding."""
    limits = ExecutorLimits(5, 64, 16, run_ahead, tree_shapes=(TreeShape.chain(3),), max_drafting=(3,))
    executor = ScriptedExecutor(limits)
    engine = Engine(executor)
    prompts = [[number + 1] for number in range(num_sequences)]
    sequences = [engine.add(request(prompt, new=9 + 4 * number)) for number, prompt in enumerate(prompts)]
    for number, (seq, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        assert tokens_of(engine, seq) == plain_continuation(prompt, 0, 9 + 4 * number, set())
        assert seq.stats.speculative_steps > 0
    drafted = [step.slots for step in executor.steps if isinstance(step, Speculate)]
    assert max(map(len, drafted)) == min(num_sequences, 3)
    assert all(len(step.slots) > 3 for step in executor.steps if isinstance(step, Decode))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_a_text_repeats_where_its_last_three_tokens_came_before(parts):
    text: list[int] = []
    repeats = RepeatedText(text)
    for part in parts:
        text += part
        repeats.extend(part)
        runs = [text[end - 3 : end] for end in range(3, len(text))]
        assert repeats.is_repeated == (text[-3:] in runs)


@pytest.mark.parametrize("lookup_length", [0, 5])
def test_the_policy_hears_which_steps_looked_up_their_draft(lookup_length, monkeypatch):
    """The policy hears whether a step looked up its draft, which the text at its tree's root decides, though results
    are late.

    One token that came before counts as a match here: what the executor says hardly has three.
    """
    heard = []
    monkeypatch.setattr("cpmrt.engine.repeats.LONGEST_MATCH", 1)
    observe = DraftPolicy.observe

    def noted(policy, shape, num_tokens, *, is_lookup):
        heard.append((num_tokens, is_lookup))
        observe(policy, shape, num_tokens, is_lookup=is_lookup)

    monkeypatch.setattr(DraftPolicy, "observe", noted)
    shape = TreeShape(3, 1, 4, lookup_length)
    limits = ExecutorLimits(1, 512, 16, 3, tree_shapes=(shape,), step_seconds=(1.0, 1.1))
    results = []
    engine = Engine(ScriptedExecutor(limits, accuracy=0.8), lambda step, result: results.append((step, result)))
    prompt = [1, 2, 3, 4]
    tokens_of(engine, engine.add(request(prompt, new=300)))
    text, expected = list(prompt), []
    for step, result in results:
        gained = result.slots[0].token_ids if result.slots else ()
        if isinstance(step, Speculate) and gained:
            expected.append((len(gained), lookup_length > 0 and text[-1] in text[:-1]))
        text += gained
    assert heard == expected[: len(heard)] and len(heard) >= len(expected) - 1 > 50
    assert {is_lookup for _, is_lookup in heard} == ({False, True} if lookup_length else {False})


def steps_of_several(accuracy, several_seconds, *, run_ahead=2, num_sequences=3, tokens=300):
    """Return the decode steps of several sequences that end together; check that the tokens are those of plain
    decoding."""
    shapes = (TreeShape(2, 4, 6), TreeShape.chain(4))
    limits = ExecutorLimits(
        4, 512, 16, run_ahead, tree_shapes=shapes, max_drafting=(4, 2), step_seconds=(1.0, 1.2, 1.3),
        several_seconds=several_seconds,
    )  # fmt: skip
    executor = ScriptedExecutor(limits, accuracy=accuracy)
    engine, prompts = Engine(executor), [[number + 1] for number in range(num_sequences)]
    sequences = [engine.add(request(prompt, new=tokens)) for prompt in prompts]
    for seq, prompt in zip(sequences, prompts, strict=True):
        assert tokens_of(engine, seq) == plain_continuation(prompt, 0, tokens, set())
    return [step for step in executor.steps if isinstance(step, (Decode, Speculate)) and len(step.slots) > 1]


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_several_sequences_draft_where_it_pays(run_ahead):
    costs = ((2, (1.0, 1.3, 1.2)), (4, (1.1, 1.5, float("inf"))))
    steps = steps_of_several(0.9, costs, run_ahead=run_ahead)
    drafted = [step for step in steps if isinstance(step, Speculate)]
    assert len(drafted) > 0.9 * len(steps) and {step.shape for step in drafted if len(step.slots) == 3} == {0}
    assert len(steps) < 200


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_drafts_of_several_that_fail_cost_little(num_sequences):
    costs = ((2, (1.0, 1.3, 1.2)), (4, (1.1, 1.5, float("inf"))))
    steps = steps_of_several(0.0, costs, num_sequences=num_sequences)
    assert any(isinstance(step, Speculate) for step in steps)
    plain, *shapes = costs[num_sequences - 2][1]
    together = [step for step in steps if len(step.slots) == num_sequences]
    cost = sum(shapes[step.shape] if isinstance(step, Speculate) else plain for step in together)
    assert cost <= 1.04 * plain * 300


def test_shapes_that_cost_more_than_they_can_give_are_never_tried():
    steps = steps_of_several(0.9, ((4, (1.0, 3.1, float("inf"))),))
    assert all(isinstance(step, Decode) for step in steps if len(step.slots) == 3)


def test_several_sequences_whose_costs_are_unknown_decode_plainly_under_a_policy():
    limits = ExecutorLimits(2, 64, 16, tree_shapes=(TreeShape.chain(3),), max_drafting=(2,), step_seconds=(1.0, 1.1))
    executor = ScriptedExecutor(limits)
    engine = Engine(executor)
    for seq in [engine.add(request([number], new=12)) for number in (1, 2)]:
        tokens_of(engine, seq)
    assert {len(step.slots) for step in executor.steps if isinstance(step, Speculate)} <= {1}


@pytest.mark.parametrize("shapes", TREE_SHAPES)
@pytest.mark.parametrize("num_pages", [0, 16])
def test_a_context_that_is_filled_to_the_end(shapes, num_pages):
    """Trees that would reach past the context's end are cut there, and nothing is written outside of the sequence's
    pages."""
    for new in (1, 2, 5, 40):
        limits = ExecutorLimits(1, 64, 16, 3, tree_shapes=shapes, num_pages=num_pages, page_size=4)
        executor = ScriptedExecutor(limits, accuracy=0.9)
        prompt = [5] * (64 - new)
        engine = Engine(executor)
        assert tokens_of(engine, engine.add(request(prompt, new=new))) == plain_continuation(prompt, 0, new, set())
        assert sum(isinstance(step, (Decode, Speculate)) for step in executor.steps) <= new - 1


@pytest.mark.parametrize(("prompt", "new", "pages"), [(10, 10, 8), (40, 20, 16), (1, 1, 4)])
def test_pages_are_reserved_for_what_is_drafted_past_the_end(prompt, new, pages):
    limits = drafting(TreeShape(), num_pages=16, page_size=4)
    executor = ScriptedExecutor(limits)
    engine = Engine(executor)
    tokens_of(engine, engine.add(request([3] * prompt, new=new)))
    assert len(executor.steps[0].block_table) == pages == -(-min(prompt + new + 11, 64) // 4)
