"""Masks of several answers computed at the same time: they equal those computed alone, and a failing answer fails
alone."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from concurrent.futures import Future
from random import Random
from threading import Thread, Timer

import pytest
from form_cases import LARK_GRAMMARS, REGEXES, schemas
from hypothesis import given, settings
from hypothesis import strategies as st

from cpmrt import SamplingParams
from cpmrt.errors import FormError, RequestError
from cpmrt.grammar import Grammars, Thought, grammars, mask_threads
from cpmrt.grammar.compiled_form import CompiledForm
from cpmrt.grammar.matcher import AnswerMatcher
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

llguidance = pytest.importorskip("llguidance")
FORMS = [
    *[SamplingParams(json_schema=schema).form for schema in schemas(24, seed=4)],
    *[SamplingParams(regex=regex).form for regex in REGEXES[::12]],
    *[SamplingParams(grammar=grammar).form for grammar in LARK_GRAMMARS[::4]],
]


class User:
    """An object that stands for the user of a matcher."""


class Copied:
    """Stand-in for a matcher of which only copies are made."""

    def deep_copy(self):
        return Copied()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.open(ModelFolder.open(None).path)


def grammars_of(tokenizer, num_threads):
    return Grammars(tokenizer, tokenizer.eos_token_ids, num_threads=num_threads)


@pytest.fixture(scope="module")
def threaded(tokenizer):
    return grammars_of(tokenizer, 3)


@pytest.fixture(scope="module")
def serial(tokenizer):
    return grammars_of(tokenizer, 1)


def allowed_by(matcher):
    """Return the bits of what a matcher allows, up to the last that is set."""
    return matcher.allowed().rstrip(b"\0")


def tokens_in(bits):
    return [token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1]


@pytest.fixture(autouse=True)
def pays(monkeypatch):
    """Have masks computed at the same time from two answers on, and every form compiled for each thread, however long
    a busy machine takes for it."""
    monkeypatch.setattr(mask_threads, "_FEWEST_ANSWERS", 2)
    monkeypatch.setattr(grammars, "_QUICK_S", 60.0)


def follow(matchers, drawn):
    """Yield each round's masks, None for an ended answer, and the number that picks the tokens the answers go on
    with."""
    for choice in drawn:
        for matcher in matchers:
            while not matcher.is_complete and (certain := matcher.forced()):
                matcher.accept(certain)
        asked = [matcher for matcher in matchers if not matcher.is_complete]
        if len(asked) > 1:
            asked[0].prepare(asked[1:])
        yield [None if matcher.is_complete else allowed_by(matcher) for matcher in matchers], choice


def go_on(matchers, masks, choice):
    for number, (matcher, bits) in enumerate(zip(matchers, masks, strict=True)):
        if bits is not None:
            allowed = tokens_in(bits)
            matcher.accept([allowed[(choice + number) % len(allowed)]])


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(range(len(FORMS))), min_size=1, max_size=64),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
)
def test_masks_computed_together_are_those_of_each_alone(threaded, serial, numbers, drawn):
    together = [threaded.matcher(FORMS[number], Thought())() for number in numbers]
    alone = [serial.matcher(FORMS[number], Thought())() for number in numbers]
    for (found, choice), (expected, _) in zip(follow(together, drawn), follow(alone, drawn), strict=True):
        assert found == expected
        go_on(together, found, choice)
        go_on(alone, expected, choice)


def test_any_number_of_rows_of_one_form(threaded, serial):
    """Masks are right for 1 to 64 answers of one form, each one token further than the one before."""
    form = SamplingParams(json_schema={"type": "string", "maxLength": 70}).form
    expected, matcher = [], serial.matcher(form, Thought())()
    letter = next(token for token in range(4096) if threaded._tokenizer.written_bytes(token) == b"q")
    quote = next(token for token in range(4096) if threaded._tokenizer.written_bytes(token) == b'"')
    matcher.accept([quote])
    for _ in range(64):
        expected.append(allowed_by(matcher))
        matcher.accept([letter])
    assert len(set(expected)) > 8, "masks differ"
    for count in range(1, 65):
        answers = [threaded.matcher(form, Thought())() for _ in range(count)]
        for number, answer in enumerate(answers):
            answer.accept([quote, *[letter] * number])
        answers[0].prepare(answers[1:])
        assert [allowed_by(answer) for answer in answers] == expected[:count]


def test_who_fails_fails_alone(threaded, serial):
    """An answer that cannot go on raises the same error as alone, and the masks of the others are right."""
    numbers = range(6)
    answers = [threaded.matcher(FORMS[number], Thought())() for number in numbers]
    expected = [allowed_by(serial.matcher(FORMS[number], Thought())()) for number in numbers]
    broken = []
    for number in (1, 4):
        matcher = threaded.matcher(FORMS[number], Thought())()
        with pytest.raises(FormError):
            matcher.accept([tokens_in(bytes(~byte & 255 for byte in matcher.allowed()))[0]])
        broken.append(matcher)
    mixed = [answers[0], broken[0], *answers[1:4], broken[1], *answers[4:]]
    mixed[0].prepare(mixed[1:])
    for matcher in broken:
        with pytest.raises(FormError, match="cannot be followed"):
            matcher.allowed()
    assert [allowed_by(answer) for answer in answers] == expected


def test_a_thought_is_free_among_answers_that_are_not(threaded, serial):
    thinking = threaded.matcher(FORMS[0], Thought(closing=b"</think>"))()
    answers = [threaded.matcher(form, Thought())() for form in FORMS[1:10]]
    answers[0].prepare([thinking, *answers[1:]])
    assert len(tokens_in(thinking.allowed())) > 4000
    expected = [allowed_by(serial.matcher(form, Thought())()) for form in FORMS[1:10]]
    assert [allowed_by(answer) for answer in answers] == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_mask_that_allows_nothing_is_an_error(threaded, together):
    class Nothing(Copied):
        def deep_copy(self):
            return self

        def compute_bitmask(self):
            return bytes(512)

        def is_error(self):
            return False

    matcher = AnswerMatcher(CompiledForm(Nothing(), 1, lambda: None), threaded._vocabulary, Thought())
    if together:
        matcher._prepared = bytes(512)
    with pytest.raises(FormError, match="allows no token here"):
        matcher.allowed()


def test_what_was_prepared_does_not_outlive_a_token(threaded, serial):
    """After a token, an answer and its forks have the mask of the new place, not the one prepared before."""
    form = SamplingParams(regex="ab?c{3}").form
    answers = [threaded.matcher(form, Thought())() for _ in range(9)]
    answers[0].prepare(answers[1:])
    token = tokens_in(answers[1].allowed())[0]
    for answer in answers:
        answer.accept([token])
    expected = serial.matcher(form, Thought())()
    expected.accept([token])
    forks = [answer.fork() for answer in answers]
    assert {allowed_by(each) for each in (*forks, *answers)} == {allowed_by(expected)}


def test_slices_change_no_mask(tokenizer, serial):
    """Slices of the vocabulary only save time: masks equal those of a library without slices."""
    plain = grammars_of(tokenizer, 1)
    plain.__dict__["_library"] = llguidance.LLTokenizer(tokenizer.serialized(), eos_token=plain._end_ids, slices=[])
    both = [[each.matcher(form, Thought())() for form in FORMS[:12]] for each in (serial, plain)]
    for (found, choice), (expected, _) in zip(*[follow(each, range(7, 4007, 400)) for each in both], strict=True):
        assert found == expected
        go_on(both[0], found, choice)
        go_on(both[1], expected, choice)


def test_answers_of_one_form_share_it_out():
    """Successive answers use one compiled form; simultaneous ones use up to the allowed number, an idle one first."""
    coming = []

    def compile_beside():
        coming.append(Future())
        return coming[-1]

    form, users = CompiledForm(Copied(), 3, compile_beside), [User() for _ in range(9)]
    first = form.origin()
    first.copy_for(User())
    gc.collect()
    assert form.origin() is first and not coming, "nobody uses it now"
    first.copy_for(users[0])
    assert form.origin() is first and len(coming) == 1, "another one is on its way"
    assert form.origin() is first and len(coming) == 1, "and only one"
    coming[0].set_result(Copied())
    second = form.origin()
    assert second is not first and second.num_users == 0
    second.copy_for(users[1])
    assert form.origin() in (first, second)
    coming[1].set_result(Copied())
    third = form.origin()
    third.copy_for(users[2])
    assert len({first, second, third}) == 3 and form.origin() and len(coming) == 2
    users[1] = None
    gc.collect()
    assert form.origin() is second


@pytest.mark.parametrize("outcome", [RequestError("too large"), MemoryError()])
def test_a_form_that_compiles_once_only_stays_alone(outcome):
    coming, user = Future(), User()
    begun = []
    form = CompiledForm(Copied(), 4, lambda: begun.append(coming) or coming)
    first = form.origin()
    first.copy_for(user)
    assert form.origin() is first and len(begun) == 1
    if isinstance(outcome, RequestError):
        coming.set_result(outcome)
    else:
        coming.set_exception(outcome)
    assert [form.origin(), form.origin()] == [first, first] and len(begun) == 1, "it is not tried again"


def test_two_threads_take_in_a_compiled_form_once():
    others = []

    class Asked(Future):
        """A future during whose `done` another thread asks the form for an origin."""

        def done(self):
            if not others:
                others.append(Thread(target=form.origin))
                others[0].start()
                others[0].join(0.2)
            return super().done()

    coming, user = Asked(), User()
    form = CompiledForm(Copied(), 3, lambda: coming)
    form.origin().copy_for(user)
    form.origin()
    coming.set_result(Copied())
    form.origin()
    others[0].join()
    assert len(form._origins) == 2


def test_a_form_that_waits_for_its_turn_is_quick_all_the_same(tokenizer, monkeypatch):
    own = grammars_of(tokenizer, 3)
    monkeypatch.setattr(grammars, "_QUICK_S", 0.2)
    monkeypatch.setattr(own, "_compile", lambda form: Copied())
    turns = [own._compiling.acquire(blocking=False) for _ in range(2)]
    Timer(2 * grammars._QUICK_S, own._compiling.release).start()
    assert all(turns) and own._compile_first(FORMS[0])._most == 3


def test_a_signal_handler_may_ask_for_a_form_while_the_thread_that_it_interrupts_does(tokenizer, monkeypatch):
    own, user, library = grammars_of(tokenizer, 3), User(), grammars._llguidance
    form = CompiledForm(Copied(), 3, lambda: signal.raise_signal(signal.SIGUSR1))
    asked = [form.origin, lambda: own.matcher(FORMS[0])]

    def interrupted():
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return library()

    def give_up(number, frame):
        raise TimeoutError("the handler waits for the thread that it has interrupted")

    handlers = ((signal.SIGUSR1, lambda *_: asked and asked.pop()()), (signal.SIGALRM, give_up))
    before = [(number, signal.signal(number, handler)) for number, handler in handlers]
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        monkeypatch.setattr(grammars, "_llguidance", interrupted)
        own.matcher(FORMS[1])
        form.origin().copy_for(user)
        form.origin()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before:
            signal.signal(number, handler)
    assert not asked


def test_a_form_stays_alone_where_no_thread_can_begin(tokenizer, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    own, user = grammars_of(tokenizer, 3), User()
    form = CompiledForm(Copied(), 3, lambda: own._compile_beside(FORMS[0]))
    first = form.origin()
    first.copy_for(user)
    with monkeypatch.context() as patch:
        patch.setattr(grammars.Thread, "start", refuse)
        assert [form.origin() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize(("cores", "threads"), [(1, 0), (2, 1), (4, 2), (16, 8), (128, 8)])
def test_threads_leave_half_of_the_cores_to_others(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    assert mask_threads.default_num_threads() == threads
    pays = mask_threads.MaskThreads(threads, 64).pay(64, 64, 0.0)
    assert pays == (threads > 1)


@pytest.mark.parametrize("number", range(0, len(FORMS), 3))
def test_forks_of_one_answer_are_looked_at_together(threaded, serial, monkeypatch, number):
    """Forks of one answer, as the nodes of a drafted tree are, have right masks with one and with several matchers."""
    monkeypatch.setattr(mask_threads, "_LEAST_SECONDS", 0.0)
    answer = threaded.matcher(FORMS[number], Thought())()
    alone = serial.matcher(FORMS[number], Thought())()
    rng = Random(number)
    for _ in range(12):
        if alone.is_complete:
            break
        bits = allowed_by(alone)
        assert allowed_by(answer) == bits
        tokens = tokens_in(bits)
        drawn = [rng.choice(tokens) for _ in range(rng.randint(2, 9))]
        forks, copies = [answer.fork() for _ in drawn], [alone.fork() for _ in drawn]
        for fork, copied, token in zip(forks, copies, drawn, strict=True):
            fork.accept([token])
            copied.accept([token])
        going_on = [place for place, copied in enumerate(copies) if not copied.is_complete]
        if going_on:
            forks[going_on[0]].prepare([forks[place] for place in going_on[1:]])
        for place in going_on:
            assert forks[place]._prepared or len(going_on) == 1, "it was computed"
            assert allowed_by(forks[place]) == allowed_by(copies[place])
        chosen = rng.randrange(len(drawn))
        answer, alone = forks[chosen], copies[chosen]
        if answer._form._coming is not None:
            answer._form._coming.exception(timeout=60)
    assert alone.is_complete or len(answer._cursors._all) == 3, "as many as there are threads"


def test_a_fork_that_fails_among_others_fails_alone(threaded, monkeypatch):
    monkeypatch.setattr(mask_threads, "_LEAST_SECONDS", 0.0)
    answer = threaded.matcher(SamplingParams(regex="(ab|cd){4}x").form, Thought())()
    a, c, x = (threaded._library.tokenize_str(letter)[0] for letter in "acx")
    forks = [answer.fork() for _ in range(3)]
    forks[0].accept([a])
    with pytest.raises(FormError):
        forks[1].accept([x])
    forks[2].accept([c])
    forks[0].prepare(forks[1:])
    b, d = (threaded._library.tokenize_str(letter)[0] for letter in "bd")
    assert b in tokens_in(forks[0].allowed()) and d in tokens_in(forks[2].allowed())
    with pytest.raises(FormError, match="cannot be followed"):
        forks[1].allowed()


def test_quick_masks_of_forks_wake_no_thread(threaded, monkeypatch):
    monkeypatch.setattr(mask_threads.MaskThreads, "masks", lambda *_: pytest.fail("they are there sooner without"))
    answer = threaded.matcher(SamplingParams(regex="[ab]{8}").form, Thought())()
    tokens = tokens_in(answer.allowed())
    answer._seconds = 1e-6
    forks = [answer.fork() for _ in range(9)]
    for fork in forks:
        fork.accept(tokens[:1])
    forks[0].prepare(forks[1:])


def test_after_one_slow_mask_the_threads_do_not_stay(threaded, monkeypatch):
    """A single slow mask, as the first one is while the lexer is made, does not keep the threads in use for few
    answers."""
    monkeypatch.setattr(mask_threads, "_FEWEST_ANSWERS", 8)
    monkeypatch.setattr(mask_threads, "_LEAST_SECONDS", 0.01)
    ticks = itertools.count(step=1e-4)  # any mask but the first takes so long, however busy the machine is
    monkeypatch.setattr("cpmrt.grammar.matcher.perf_counter", lambda: next(ticks))
    answers = [threaded.matcher(SamplingParams(regex="[ab]{90}").form, Thought())() for _ in range(3)]
    woken, compute = [], mask_threads.MaskThreads.masks
    monkeypatch.setattr(mask_threads.MaskThreads, "masks", lambda *each: woken.append(each) or compute(*each))
    tokens = tokens_in(answers[0].allowed())
    for answer in answers:
        answer._seconds = 0.02
    for _ in range(8):
        answers[0].prepare(answers[1:])
        for answer in answers:
            answer.allowed()
            answer.accept(tokens[:1])
    assert 1 <= len(woken) < 8
