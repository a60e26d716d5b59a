"""One LLM in many threads: every answer is the one got alone, and no slot is lost, whoever leaves or fails."""

import gc
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from serving import saying_llm
from timing import until
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import ClosedError, RequestError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Release
from cpmrt.sharing.jobs import EndsInbox

SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, executor="reference") as made:
        yield made


@pytest.fixture
def is_whole(llm):
    """A check after the test that every slot and every page is free again."""
    yield
    assert llm.engine.is_idle and llm.shared.is_idle
    assert llm.engine.slots.free == (0,) and llm.engine.cache.pool.num_held == 0


def in_thread(call):
    """Run a call in a new thread; the result has its value or its exception."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("max_sequences", [1, 3])
def test_answers_of_threads_are_those_alone(checkpoint, max_sequences):
    with LLM(checkpoint, executor="reference", max_sequences=max_sequences) as llm:
        asks = [(f"prompt {n}", SamplingParams(max_new_tokens=12, temperature=1.0, seed=n)) for n in range(6)]
        ids = llm.tokenizer.encode("a text to score")
        alone, scores = [llm.generate(*ask) for ask in asks], llm.score(ids)

        def call(number):
            if number % 3 == 0:
                return llm.generate(*asks[number]).token_ids
            if number % 3 == 1:
                return tuple(token for piece in llm.stream(*asks[number]) for token in piece.token_ids)
            np.testing.assert_allclose(llm.score(ids), scores, atol=1e-5)
            return alone[number].token_ids

        with ThreadPoolExecutor(6) as pool:
            for _ in range(5):
                assert list(pool.map(call, range(6))) == [answer.token_ids for answer in alone]
        assert len(llm.engine.slots.free) == max_sequences and llm.engine.cache.pool.num_held == 0


class Caller:
    """Makes random calls in one thread and checks their results.

    `asks` and `texts` are pairs and triples of what to ask and the results that it has alone.
    """

    def __init__(self, llm, seed, asks, texts):
        self.llm, self.random, self.asks, self.texts = llm, random.Random(seed), asks, texts

    def generate(self):
        ask, whole = self.random.choice(self.asks)
        assert self.llm.generate(*ask).token_ids == whole

    def several(self):
        chosen = self.random.choices(self.asks, k=3)
        answers = self.llm.generate([prompt for (prompt, _), _ in chosen], [params for (_, params), _ in chosen])
        assert [answer.token_ids for answer in answers] == [whole for _, whole in chosen]

    def stream(self):
        ask, whole = self.random.choice(self.asks)
        assert tuple(token for piece in self.llm.stream(*ask) for token in piece.token_ids) == whole

    def leave(self):
        ask, whole = self.random.choice(self.asks)
        stream, found = self.llm.stream(*ask), ()
        for piece in stream:
            found += piece.token_ids
            if self.random.random() < 0.3:
                break
        assert found == whole[: len(found)]
        if self.random.random() < 0.3:
            stream.cycle = stream  # left to the garbage collector, in whatever thread it runs

    def cancel(self):
        with self.llm.stream(*self.random.choice(self.asks)[0]) as stream:
            if self.random.random() < 0.5:
                next(stream)
        assert stream.completion.finish_reason == "cancelled"

    def score(self):
        text, scores, _ = self.random.choice(self.texts)
        np.testing.assert_array_equal(self.llm.score(text), scores)

    def embed(self):
        text, _, vector = self.random.choice(self.texts)
        np.testing.assert_array_equal(self.llm.embed(text), vector)

    def run(self, count):
        calls = (self.generate, self.several, self.stream, self.leave, self.cancel, self.score, self.embed)
        for _ in range(count):
            self.random.choice(calls)()


@pytest.mark.parametrize("settings", [{"max_sequences": 3}, {"draft": "lookup"}], ids=str)
@pytest.mark.parametrize("num_calls", [4, pytest.param(200, marks=pytest.mark.all)])
def test_random_calls_of_eight_threads(checkpoint, settings, num_calls):
    with LLM(checkpoint, executor="reference", **settings) as llm:
        params = [SamplingParams(max_new_tokens=2 + n, temperature=n % 2, seed=n, ignore_eos=True) for n in range(8)]
        asks = [(f"prompt {n} prompt {n}", own) for n, own in enumerate(params)]
        asks = [(ask, llm.generate(*ask).token_ids) for ask in asks]
        texts = [(text, llm.score(text), llm.embed(text)) for text in ("abc", "a longer text", "x" * 40)]
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(Caller(llm, seed, asks, texts).run, num_calls) for seed in range(8)]:
                done.result(900)
        gc.collect()
        assert llm.shared.is_idle and len(llm.engine.slots.free) == settings.get("max_sequences", 1)
        assert llm.engine.cache.pool.num_held == 0


def test_threads_share_steps(checkpoint):
    """Four callers in four slots take about as many decode steps as one caller."""
    steps = []

    def listener(step, _):
        if not steps:
            until(lambda: len(llm.shared._sleeping) == 3, 20)  # the other callers have asked, and wait for this one
        steps.append(step)

    def call(number):
        return llm.generate([5 + number], SamplingParams(max_new_tokens=60, ignore_eos=True))

    with LLM(checkpoint, executor="reference", max_sequences=4, on_step=listener) as llm, ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(4)))
    rows = [len(step.slots) for step in steps if isinstance(step, Decode)]
    assert sum(rows) >= 4 * 59 and max(rows) == 4 and len(rows) < 2 * 60


def test_streams_of_threads_interleave(checkpoint):
    """Each of two threads gets the first pieces of its stream before the other stream is half over."""
    order, steps = [], []

    def listener(step, _):
        if not steps:
            until(lambda: llm.shared._sleeping, 20)  # the other thread has asked too
        steps.append(step)
        if len(steps) == 25:
            until(lambda: {*order} == {"a", "b"}, 20)

    def read(name):
        for _ in llm.stream(name, SamplingParams(max_new_tokens=50, ignore_eos=True)):
            order.append(name)

    with LLM(checkpoint, executor="reference", max_sequences=2, on_step=listener) as llm, ThreadPoolExecutor(2) as pool:
        list(pool.map(read, "ab"))
    assert len(order) >= 100 and "a" in order[order.index("b") :] and "b" in order[order.index("a") :]


def leave_by_break(llm):
    for _ in llm.stream("abc", SAMPLED):
        break


def leave_by_del(llm):
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    del stream


def leave_in_a_cycle(llm):
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()


def leave_unread(llm):
    llm.stream("abc", SAMPLED)


@pytest.mark.usefixtures("is_whole")
@pytest.mark.parametrize("leave", [leave_by_break, leave_by_del, leave_in_a_cycle, leave_unread])
def test_a_stream_that_is_left_is_cancelled_at_once(llm, leave):
    leave(llm)
    assert llm.engine.slots.free == (0,) and not llm.engine.running
    assert llm.logits([1, 2]).shape == (2, llm.config.vocab_size)


@pytest.mark.usefixtures("is_whole")
def test_a_stream_may_be_collected_in_the_middle_of_any_step(llm):
    """An abandoned stream may be collected in any step: here the collector runs as often as possible."""
    alone = llm.generate("abc", SAMPLED).token_ids
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(10):
            stream = llm.stream("left", SAMPLED)
            stream.cycle = [stream]
            next(stream)
            del stream
            assert llm.generate("abc", SAMPLED).token_ids == alone
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()


@pytest.mark.usefixtures("is_whole")
def test_a_reading_waits_for_a_slot_and_the_stream_goes_on(llm):
    whole, logits = llm.generate("abc", SAMPLED), llm.logits([1, 2, 3])
    stream = llm.stream("abc", SAMPLED)
    first = next(stream)
    np.testing.assert_allclose(llm.logits([1, 2, 3]), logits, atol=1e-5)
    assert first.token_ids + tuple(token for piece in stream for token in piece.token_ids) == whole.token_ids
    assert stream.completion.text == whole.text and stream.completion.finish_reason == "length"


@pytest.mark.usefixtures("is_whole")
def test_one_stream_may_be_read_by_two_threads(llm):
    whole = llm.generate("abc", SAMPLED).token_ids
    stream = llm.stream("abc", SAMPLED)
    futures = [in_thread(lambda: [piece.token_ids for piece in stream]) for _ in range(2)]
    found = [tokens for future in futures for tokens in future.result(20)]
    assert sorted(token for tokens in found for token in tokens) == sorted(whole)
    assert list(stream) == []


def test_closing_ends_calls_that_wait_and_refuses_others(checkpoint):
    begun = threading.Event()

    def listener(*_):
        begun.set()
        time.sleep(0.05)  # no answer of 200 tokens ends before the model is closed

    llm = LLM(checkpoint, executor="reference", on_step=listener)
    long = SamplingParams(max_new_tokens=200, ignore_eos=True)
    stream = llm.stream("own", long)
    futures = [in_thread(lambda: llm.generate("x", long)), in_thread(lambda: llm.logits([1, 2])),
               in_thread(lambda: list(llm.stream("y", long)))]  # fmt: skip
    assert begun.wait(20)
    llm.close()
    llm.close()
    for future in futures:
        with pytest.raises(ClosedError, match="closed"):
            future.result(20)
    for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.score([1, 2]), lambda: list(stream)):
        with pytest.raises(ClosedError, match="make a new LLM"):
            call()
    assert stream.completion.finish_reason == "cancelled"


def test_a_listener_may_close_and_may_not_ask(checkpoint):
    found = []

    def listener(step, _):
        if isinstance(step, Decode) and not found:
            with pytest.raises(RequestError, match="listener"):
                llm.generate("from inside")
            found.append(step)
            llm.close()

    llm = LLM(checkpoint, executor="reference", on_step=listener)
    with pytest.raises(ClosedError):
        llm.generate("x", SAMPLED)
    assert found
    with pytest.raises(ClosedError):
        llm.generate("x", SAMPLED)


def test_a_forked_process_is_told(llm):
    stream = llm.stream("abc", SAMPLED)
    next(stream)
    child = os.fork()
    if child == 0:
        outcome = 1
        try:
            llm.generate("x")
        except ClosedError as error:
            outcome = 0 if "forked" in str(error) else 2
        finally:
            os._exit(outcome)
    assert os.waitpid(child, 0)[1] == 0
    assert len(stream.finish().token_ids) == 20


@pytest.mark.usefixtures("is_whole")
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("streams", [False, True])
def test_ctrl_c_ends_the_call_of_the_main_thread_and_no_other(llm, at, streams):
    """Ctrl-C ends only the main thread's call, also when it comes while a step's results are handed out."""
    alone, count = llm.generate("other", SAMPLED), [0]

    def listener(step, _):
        count[0] += 1
        if count[0] == at:
            signal.raise_signal(signal.SIGINT)

    other = llm.stream("other", SAMPLED)
    llm.engine.listener = listener
    try:
        with pytest.raises(KeyboardInterrupt):
            if streams:
                for _ in llm.stream("mine", SAMPLED):
                    pass
            else:
                llm.generate("mine", SAMPLED)
    finally:
        llm.engine.listener = None
    assert other.finish().token_ids == alone.token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_another_thread_drives(checkpoint):
    """Ctrl-C while the main thread sleeps in `generate` cancels its request; the other thread's request goes on."""
    params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(checkpoint, executor="reference") as llm:
        alone, drives, main = llm.generate("other", params).token_ids, threading.Event(), threading.get_ident()

        def listener(step, _):
            drives.set()
            if isinstance(step, Decode) and threading.get_ident() != main:
                until(lambda: llm.shared._sleeping, 20)
                llm.engine.listener = None
                signal.pthread_kill(main, signal.SIGINT)

        llm.engine.listener = listener
        other = in_thread(lambda: llm.generate("other", params))
        drives.wait()
        with pytest.raises(KeyboardInterrupt):
            llm.generate("mine", params)
        assert other.result(20).token_ids == alone
        assert llm.shared.is_idle and llm.engine.slots.free == (0,)


LIMITS = ExecutorLimits(max_sequences=2, max_context=4096, prefill_chunk=256, run_ahead=2)


def test_a_fault_reaches_the_caller_that_caused_it(tmp_path):
    def fail(step):
        if isinstance(step, Admit) and step.seed == 13:
            raise RequestError("seed 13 is refused")

    with saying_llm(tmp_path, lambda prompt: "a long answer to it", limits=LIMITS, fail=fail) as llm:
        def call(seed):
            return llm.generate("x", SamplingParams(max_new_tokens=30, seed=seed)).text

        for _ in range(10):
            futures = [in_thread(lambda seed=seed: call(seed)) for seed in (1, 13, 2, 13)]
            for future in futures[::2]:
                assert future.result(20) == "a long answer to it"
            for future in futures[1::2]:
                with pytest.raises(RequestError, match="seed 13"):
                    future.result(20)
        assert len(llm.engine.slots.free) == 2


def test_what_a_listener_raises_costs_nobody_else_a_token(tmp_path):
    with saying_llm(tmp_path, lambda prompt: "a long answer to it", limits=LIMITS) as llm:
        first, second = llm.stream("x"), llm.stream("y")
        next(second)

        def listener(step, _):
            llm.engine.listener = None
            raise ValueError("a bug")

        llm.engine.listener = listener
        with pytest.raises(ValueError, match="a bug"):
            first.finish()
        assert second.finish().text == "a long answer to it"
        assert first.completion.finish_reason == "cancelled" and len(llm.engine.slots.free) == 2


@pytest.mark.parametrize("kind", [Admit, Decode, Release])
def test_a_listener_that_raises_does_not_cost_an_answer_its_stop_string(checkpoint, kind):
    errors = []

    def listener(step, _):
        if errors and isinstance(step, kind):
            raise errors.pop()

    with LLM(checkpoint, executor="reference", on_step=listener) as llm:
        text = llm.generate("a", SAMPLED).text
        params = replace(SAMPLED, stop=(text[5:7],))
        wanted, inbox = llm.generate("a", params), EndsInbox()
        job = llm.maker.only_choice("a", params)
        llm.shared.submit([job], inbox)
        errors.append(ValueError("a listener"))
        with pytest.raises(ValueError, match="a listener"):
            llm.shared.next(inbox)
        _, end = llm.shared.next(inbox)
        assert (end.reason, end.error) == ("stop", None) and job.completion.token_ids == wanted.token_ids
