"""Sequences under a grammar that are drafted for: any tree gives the plain masked continuation."""

from __future__ import annotations

import io
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import TREE_SHAPES, ScriptedExecutor, masked_token
from scripted_forms import END, Automaton, expected, limits, masked_continuation, request, tokens_of

from cpmrt.config import Sampling, TreeShape
from cpmrt.engine import Engine, guide, loops
from cpmrt.engine.step_log import StepLog, read_steps, replay
from cpmrt.errors import FormError, MaskError
from cpmrt.executor import Decode, Mask, Prefill, Speculate, TreeMasks


class Drafting(ScriptedExecutor):
    """An executor that drafts what a sequence's grammar allows; `grammars` maps a sequence's seed to its grammar's
    number."""

    grammars: dict[int, int | None] = {}  # noqa: RUF012 - replaced by each test

    def right(self, running, path):
        number = self.grammars.get(running.admit.seed)
        if number is None:
            return super().right(running, path)
        tokens = [*running.tokens, *path]
        automaton = Automaton(number)
        automaton.tokens = tokens[len(tokens) - running.num_generated - len(path) :]
        return masked_token(tokens, running.admit.seed, automaton.following())


def drafting(limits, grammars, **others):
    executor = Drafting(limits, **others)
    executor.grammars = grammars
    return executor


SHAPED = st.builds(
    lambda shapes, seconds, **others: limits(
        tree_shapes=shapes, takes_tree_masks=True, step_seconds=seconds and (1.0, *seconds[: len(shapes)]), **others
    ),
    st.sampled_from(TREE_SHAPES), st.sampled_from([(), (1.1, 1.2, 1.3), (3.0, 2.0, 1.5)]),
    run_ahead=st.integers(1, 5), max_sequences=st.integers(1, 3), prefill_chunk=st.integers(2, 9),
    num_pages=st.sampled_from([0, 3 * 32]), page_size=st.just(4),
    certain_rows=st.sampled_from([0, 1, 3, 16, 64]),
)  # fmt: skip
WANTED = st.tuples(
    st.lists(st.integers(0, 48), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(0, 9)),
    st.integers(1, 50),
    st.sets(st.integers(0, 48), max_size=2),
    st.sampled_from([0, 0, 2]),
)


def steady(num_tokens):
    """Return a patch that lets trees follow trees after `num_tokens` tokens without a certain one."""
    return patch.object(guide, "_STEADY_TOKENS", num_tokens)


def added(engine, seed, wish):
    prompt, number, new, stop, logprobs = wish
    made = request(prompt, number, new=new, seed=seed, stop=stop)
    return engine.add(replace(made, sampling=Sampling(logprobs=logprobs)))


@given(
    SHAPED, st.lists(WANTED, min_size=1, max_size=4), st.sampled_from([0.3, 0.95]), st.integers(0, 3),
    st.sampled_from([0, 0, 2, 8]),
)  # fmt: skip
def test_every_tree_gives_the_masked_continuation(limits, wanted, accuracy, draft_seed, num_steady):
    grammars = {seed: wish[1] for seed, wish in enumerate(wanted)}
    executor = drafting(limits, grammars, accuracy=accuracy, draft_seed=draft_seed)
    engine = Engine(executor, prefix_cache=False)
    sequences = [added(engine, seed, wish) for seed, wish in enumerate(wanted)]
    with steady(num_steady):
        answered = [(seq, tokens_of(engine, seq)) for seq in reversed(sequences)]
    for seed, ((seq, tokens), (prompt, number, new, stop, _)) in enumerate(zip(answered[::-1], wanted, strict=True)):
        assert tokens == expected(prompt, number, seed, new, stop)
        if number is not None:
            assert seq.finish_reason == masked_continuation(prompt, number, seed, new, stop)[1]
    while executor.queue:
        executor.run_one()
    assert not executor.running, "every slot is released"
    assert executor.most_in_flight <= limits.run_ahead


@pytest.mark.parametrize("run_ahead", [1, 4])
@pytest.mark.parametrize("shapes", TREE_SHAPES)
def test_steps_that_bring_certain_tokens_are_not_drafted(run_ahead, shapes):
    """Steps without certain tokens draft, but for the last token, and no plain step precedes one with certain
    tokens."""
    bring, others, drafted = 0, 0, 0
    for number in range(10):
        executor = drafting(limits(run_ahead, tree_shapes=shapes, takes_tree_masks=True), {1: number}, accuracy=0.9)
        engine = Engine(executor, prefix_cache=False)
        tokens = tokens_of(engine, engine.add(request([1, 2, 3], number, seed=1)))
        assert tokens == masked_continuation([1, 2, 3], number, 1, 40)[0]
        bring += sum(isinstance(step, Decode) and bool(step.certain) for step in executor.steps)
        others += sum(isinstance(step, Decode) and not step.certain for step in executor.steps)
        drafted += sum(isinstance(step, Speculate) for step in executor.steps)
    assert drafted > 10 and bring > 0 and others <= 10, (drafted, bring, others)


def test_drafts_give_certain_tokens_that_no_step_brings():
    """Where no step may bring certain tokens, right drafts still give as many tokens per step as in a free answer."""
    for number in range(6):
        made = limits(4, certain_rows=0, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True)
        executor = drafting(made, {1: number}, accuracy=1.0)
        engine = Engine(executor, prefix_cache=False)
        tokens = tokens_of(engine, engine.add(request([1, 2, 3], number, seed=1)))
        assert tokens == masked_continuation([1, 2, 3], number, 1, 40)[0]
        steps = [step for step in executor.steps if isinstance(step, (Decode, Speculate))]
        assert len(steps) <= len(tokens) // 4 + 2, (number, len(tokens))


def test_drafts_save_steps_under_a_grammar():
    """Every step that does not take certain tokens is drafted, and right drafts are accepted."""

    def steps(**others):
        executor = drafting(limits(4, **others), {1: 7}, accuracy=1.0)
        tokens = tokens_of(engine := Engine(executor, prefix_cache=False), engine.add(request([1, 2, 3], 7, seed=1)))
        assert tokens == masked_continuation([1, 2, 3], 7, 1, 40)[0]
        return [step for step in executor.steps if isinstance(step, (Decode, Speculate))]

    plain, drafted = steps(), steps(tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True)
    assert len(drafted) < 0.8 * len(plain), (len(drafted), len(plain))


def test_an_executor_that_cannot_mask_trees_decodes_plainly():
    executor = drafting(limits(tree_shapes=(TreeShape(),)), {1: 7})
    engine = Engine(executor, prefix_cache=False)
    tokens_of(engine, engine.add(request([1, 2, 3], 7, seed=1)))
    assert not any(isinstance(step, Speculate) for step in executor.steps)
    tokens_of(engine, engine.add(request([1, 2, 3])))
    assert isinstance(executor.steps[-2], Speculate)


@pytest.mark.parametrize("fails_at", [0, 1, 4, 9])
@pytest.mark.parametrize("run_ahead", [1, 4])
def test_what_allows_nothing_ends_the_answer_behind_the_last_right_token(fails_at, run_ahead, monkeypatch):
    monkeypatch.setattr(guide, "_STEADY_TOKENS", 0)
    executor = drafting(
        limits(run_ahead, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: 7}, accuracy=1.0
    )
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(request([1, 2, 3], 7, seed=1, fails_at=fails_at))
    tokens = []
    with pytest.raises(FormError, match="nothing is allowed"):
        for result in engine.stream(seq):
            tokens += result.token_ids
    right = masked_continuation([1, 2, 3], 7, 1, fails_at)[0] if fails_at else []
    assert tokens == seq.token_ids == right[: len(tokens)]


@pytest.mark.parametrize(("ignored", "found_out"), [("masks", FormError), ("cuts", MaskError)])
def test_an_executor_that_ignores_masks_of_trees_is_found_out(ignored, found_out):
    class Strict(Automaton):
        def accept(self, token_ids):
            for token in token_ids:
                if token not in self.following():
                    raise FormError("not allowed")
                self.tokens.append(token)

    class Ignorant(Drafting):
        def _left(self, children, shape, masks):
            found = super()._left(children, shape, masks)
            masks_of = {node: None for node in found} if ignored == "masks" else found
            return masks_of if ignored == "masks" else dict.fromkeys(range(shape.tree_size)) | found

    shapes = (TreeShape.chain(7),)
    executor = Ignorant(limits(tree_shapes=shapes, takes_tree_masks=True), accuracy=1.0)
    executor.grammars = {1: 7}
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(replace(request([1, 2, 3], 7, seed=1), matcher=lambda: Strict(7)))
    with pytest.raises(found_out):
        tokens_of(engine, seq)


def test_a_stop_within_certain_tokens_takes_nothing_back_from_the_drafts_before():
    stopped = 0
    for number in range(40):
        executor = drafting(limits(tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: number}, accuracy=0.9)
        collected = []
        engine = Engine(executor, lambda step, _, collected=collected: collected.append(step), prefix_cache=False)
        seq = engine.add(request([1, 2, 3], number, seed=1))
        while seq.finish_reason is None:
            before = len(seq.token_ids)
            engine.advance()
            is_certain = isinstance(collected[-1], Decode) and any(collected[-1].certain)
            if is_certain and len(seq.token_ids) - before >= 3 and seq.finish_reason is None:
                counts = list(seq.accepts.histogram)
                engine.stop(seq, before + 1)
                assert seq.accepts.histogram == counts
                stopped += 1
    assert stopped > 5


def test_loans_do_not_wait_for_a_tree():
    """While a slot is lent, steps have their masks when submitted, as the slot's holder may wait for the executor."""
    executor = drafting(
        limits(4, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: 9}, accuracy=0.5
    )
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(request([1, 2, 3], 9, seed=1))
    for _ in range(2):
        engine.advance()
    loan = engine.borrow(5)
    while loan.slot < 0:
        engine.advance()
    begun = len(executor.steps)
    for _ in range(3):
        engine.advance()
        unfilled = [step for step, _ in executor.queue if isinstance(step, Speculate) and step.masks.bits is None]
        assert not unfilled
    assert not any(isinstance(step, Speculate) for step in executor.steps[begun:])
    engine.give_back(loan)
    assert tokens_of(engine, seq) == masked_continuation([1, 2, 3], 9, 1, 40)[0]
    assert any(isinstance(step, Speculate) for step in executor.steps[begun:])


def test_beside_others_a_tree_is_waited_for_as_soon_as_it_is_submitted():
    """Beside other sequences no step is in flight before a tree, whose masks the engine finds at once after submitting
    it."""
    executor = drafting(
        limits(4, prefill_chunk=3, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: 9}, accuracy=0.5
    )
    submit, trees = executor.submit, []

    def watched(step):
        if isinstance(step, Speculate) and step.masks is not None:
            assert not [queued for queued, _ in executor.queue if isinstance(queued, (Prefill, Decode, Speculate))]
            trees.append(step)
        return submit(step)

    executor.submit = watched
    engine = Engine(executor, prefix_cache=False)
    first, second = engine.add(request([1, 2, 3], 9, seed=1)), engine.add(request(range(40), None, seed=0, new=3))
    while not (first.finish_reason and second.finish_reason):
        engine.advance()
        assert all(step.masks.bits is not None for step in trees)
    assert trees and first.token_ids == masked_continuation([1, 2, 3], 9, 1, 40)[0]


class WithoutRuns(Automaton):
    """A grammar that allows several tokens at each place, but exactly one at each of six places after thirty tokens."""

    def _following(self, tokens):
        if 30 <= len(tokens) < 36:
            return [len(tokens)]
        return [len(tokens) % 40, 41, 42, 43]


@pytest.mark.parametrize("company", [False, True])
def test_trees_follow_trees_while_nothing_certain_is_expected(company):
    """The next tree is submitted before the last one's result is read, unless another sequence waits."""
    shaped = limits(4, max_sequences=2, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True)
    executor, num_before = drafting(shaped, {}, accuracy=0.5), []
    submit, num_read = executor.submit, []

    def watched(step):
        if isinstance(step, Speculate):
            num_before.append(len(executor.steps) - len(num_read))
        return submit(step)

    executor.submit = watched
    engine = Engine(executor, lambda *read: num_read.append(read), prefix_cache=False)
    made = replace(request([1, 2, 3], seed=1, new=70), matcher=lambda: WithoutRuns(7))
    seq = engine.add(made)
    while len(seq.token_ids) < 24:
        engine.advance()
        assert all(step.masks.bits for step in executor.steps if isinstance(step, Speculate)), "the device waits for us"
    assert num_before[:2] == [0, 0] and num_before[-2:] == [1, 1] and sorted(num_before) == num_before
    num_before.clear()
    if company:
        other = engine.add(request([4, 5], seed=2, new=2))
        while not other.finish_reason:
            engine.advance()
        assert not any(num_before[1:]), "the other one gets its slot, and decodes plainly beside this"
    else:
        while len(seq.token_ids) < 36:
            engine.advance()
            num_before.clear()
        while len(num_before) < 9:
            engine.advance()
        assert num_before[0] == 0 and num_before[-1] == 1, "certain tokens have come, and steps behind them waited"
    while not seq.finish_reason:
        engine.advance()
    assert engine.is_idle and len(seq.token_ids) == 70
    alone = Engine(drafting(limits(1), {}), prefix_cache=False)
    assert tokens_of(alone, alone.add(made)) == seq.token_ids


def test_a_cancelled_sequence_lets_its_tree_go():
    """A sequence cancelled while its tree is in flight lets the tree go before anything has computed the nodes'
    masks."""
    executor = drafting(limits(1, tree_shapes=(TreeShape.chain(3),), takes_tree_masks=True), {1: 7})
    heard, submit = [], executor.submit
    engine = Engine(executor, prefix_cache=False)
    seq = engine.add(request([1, 2, 3], 7, seed=1))

    def watched(step):
        pending = submit(step)
        if isinstance(step, Speculate) and step.masks is not None and not heard:
            step.masks.on_let_go = lambda: heard.append(step)
            engine.finish(seq, "cancelled")
        return pending

    executor.submit = watched
    tokens = tokens_of(engine, seq)
    (step,) = heard
    assert step.masks.of_nodes([1, 2], [-1, 0]) == {0: None}
    assert tokens == masked_continuation([1, 2, 3], 7, 1, 40)[0][: len(tokens)]
    assert tokens_of(engine, engine.add(request([5], None, seed=0))) == expected([5], None, 0, 40, ())


class Repeating(Automaton):
    """A grammar of twelve tokens with three choices each, sixty certain tokens 1 2 3 1 2 3 ..., one of two, and an
    end."""

    def _following(self, tokens):
        if len(tokens) < 12:
            return [len(tokens), len(tokens) + 20, 48]
        return [len(tokens) % 3 + 1] if len(tokens) < 72 else [7, 8] if len(tokens) == 72 else [END]


@pytest.mark.parametrize("others", [{}, {"tree_shapes": (TreeShape.chain(7),), "takes_tree_masks": True}], ids=str)
def test_a_loop_within_certain_tokens_leaves_the_form_as_it_was(others, monkeypatch):
    """When a loop is found in the middle of a step, the answer and its form go on after the loop, not after the
    step."""
    monkeypatch.setattr(guide, "_STEADY_TOKENS", 0)
    monkeypatch.setattr(loops, "LEAST_TOKENS", 24)
    engine = Engine(drafting(limits(4, **others), {}), prefix_cache=False)
    made = replace(request([1, 2, 3], seed=1, new=90), matcher=lambda: Repeating(7), loop_repeats=3, loop_penalty=2.0)
    seq = engine.add(made)
    tokens = tokens_of(engine, seq)
    automaton = Repeating(7)
    automaton.accept(tokens)
    assert seq.finish_reason == "loop" and len(tokens) > 12 + 2 * 24 - 3


def test_steps_with_masks_of_trees_are_logged_and_replayed(tmp_path):
    shaped = limits(tree_shapes=(TreeShape(2, 3, 6),), takes_tree_masks=True, max_sequences=1)
    log = io.StringIO()
    engine = Engine(drafting(shaped, {1: 9}), StepLog(log), prefix_cache=False)
    tokens_of(engine, engine.add(request([1, 2, 3], 9, seed=1)))
    path = tmp_path / "steps.jsonl"
    path.write_text(log.getvalue())
    steps = list(read_steps(path))
    assert any(isinstance(step, Speculate) and len(step.masks.bits) > 1 for step, _ in steps)
    again = replay([step for step, _ in steps], drafting(shaped, {1: 9}))
    for (step, result), (_, recorded) in zip(again, steps, strict=True):
        assert result == recorded, step


def test_masks_of_a_tree_are_plain_data():
    asked = []

    def find(paths):
        asked.append(paths)
        return {(): b"\x06", (1,): b"\x08"}

    masks = TreeMasks(find=find)
    assert masks.of_nodes([9, 1, 2, 3, 0], [-1, 0, 0, 1, -1]) == {0: b"\x06", 1: b"\x08"}
    assert asked == [[(), (1,), (2,), (1, 3)]]
    assert masks == TreeMasks({(): b"\x06", (1,): b"\x08"}) != TreeMasks({(): None}) and masks != Mask()
    assert masks.of_nodes([9, 1], [-1, 0]) == {0: b"\x06", 1: b"\x08"} and len(asked) == 1
    masks.let_go()
    assert repr(masks) == "TreeMasks(2 nodes)" and repr(TreeMasks()) == "TreeMasks()"


def test_the_mask_of_a_root_is_found_while_the_draft_runs():
    """`prepare` computes the mask of a tree's root once, however often it is called, before the nodes are known."""
    asked = []

    class Asked(Repeating):
        def allowed(self):
            asked.append(self)
            return super().allowed()

    root = guide.Guide(Asked(7), 4)
    masks = root.tree_masks(room=20)
    assert not asked
    masks.prepare()
    masks.prepare()
    assert len(asked) == 1
    assert masks.of_nodes([9], [-1]) == {0: asked[0].allowed()}
    assert len(asked) == 2, "once by the test"
    masks.prepare()
    assert len(asked) == 2
    done = TreeMasks({(): None})
    done.prepare()
    assert done.bits == {(): None}
