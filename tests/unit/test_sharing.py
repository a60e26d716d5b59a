"""Threads that share one engine, on a scripted executor: random calls, each with the answer it has alone."""

import gc
import itertools
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedExecutor, plain_continuation

from cpmrt.config import Sampling, TreeShape
from cpmrt.engine import Engine, Request
from cpmrt.errors import ClosedError
from cpmrt.executor import ExecutorLimits, Release
from cpmrt.sharing.jobs import LEAD, STOP, WORK, Closed, Ended, EndsInbox, Generation, Inbox, Reading
from cpmrt.sharing.shared_engine import SharedEngine
from cpmrt.sharing.text_stream import TextStream


def shared_engine(max_sequences=3, **limits):
    limits = ExecutorLimits(max_sequences, 256, 16, **{"run_ahead": 2, "num_pages": 64 * max_sequences, "page_size": 4,
                                                       **limits})  # fmt: skip
    return SharedEngine(Engine(ScriptedExecutor(limits), prefix_cache=False), None)


def generation(prompt, new=12, seed=0):
    return Generation(Request(tuple(prompt), Sampling(), seed, (), new))


class Caller:
    """A thread's caller, which makes random calls on a shared engine and checks each answer."""

    def __init__(self, shared, seed):
        self.shared, self.random = shared, random.Random(seed)

    def ask(self):
        prompt = [self.random.randrange(50) for _ in range(self.random.randint(1, 40))]
        return prompt, self.random.randint(1, 40), self.random.randrange(9)

    def generate(self):
        prompt, new, seed = self.ask()
        job, inbox = generation(prompt, new, seed), EndsInbox()
        self.shared.submit((job,), inbox)
        assert self.shared.next(inbox)[1].error is None
        assert list(job.completion.token_ids) == plain_continuation(prompt, seed, new, set())

    def several(self):
        asks, inbox = [self.ask() for _ in range(self.random.randint(2, 5))], EndsInbox()
        jobs = [generation(*ask) for ask in asks]
        self.shared.submit(jobs, inbox)
        for _ in jobs:
            self.shared.next(inbox)
        for job, (prompt, new, seed) in zip(jobs, asks, strict=True):
            assert list(job.completion.token_ids) == plain_continuation(prompt, seed, new, set())

    def stream(self):
        prompt, new, seed = self.ask()
        found = [token for piece in TextStream(self.shared, generation(prompt, new, seed)) for token in piece.token_ids]
        assert found == plain_continuation(prompt, seed, new, set())

    def leave(self):
        prompt, new, seed = self.ask()
        stream, found = TextStream(self.shared, generation(prompt, new, seed)), []
        for piece in stream:
            found += piece.token_ids
            if len(found) > new // 2:
                break
        assert found == plain_continuation(prompt, seed, new, set())[: len(found)]
        if self.random.random() < 0.5:
            stream.cycle = stream  # left to the garbage collector, in whatever thread it runs

    def cancel(self):
        prompt, new, seed = self.ask()
        with TextStream(self.shared, generation(prompt, new, seed)) as stream:
            if self.random.random() < 0.5:
                next(stream)
        assert stream.completion.finish_reason == "cancelled"

    def read(self):
        slots = []

        def work(slot, block_table):
            slots.append((slot, block_table))
            for _ in range(self.random.randint(0, 4)):
                yield
            return "what was read"

        reading, inbox = Reading(20, work), Inbox()
        self.shared.submit((reading,), inbox)
        self.shared.next(inbox)
        assert reading.result == "what was read"
        ((slot, table),) = slots
        assert 0 <= slot < 3 and len(set(table)) == 5

    def run(self, count):
        calls = (self.generate, self.several, self.stream, self.leave, self.cancel, self.read)
        for _ in range(count):
            self.random.choice(calls)()


def check_whole(shared):
    assert shared.is_idle
    for _ in range(shared.engine.limits.run_ahead):
        shared.engine.advance()  # steps beyond the end of the last sequence
    assert shared.engine.is_idle
    assert len(shared.engine.slots.free) == shared.engine.limits.max_sequences
    assert shared.engine.cache.pool.num_held == 0


@pytest.mark.parametrize("shapes", [(), (TreeShape.chain(3), TreeShape(1, 8, 8))])
@pytest.mark.parametrize("num_calls", [20, pytest.param(200, marks=pytest.mark.all)])
def test_random_calls_of_eight_threads(shapes, num_calls):
    shared = shared_engine(tree_shapes=shapes)
    callers = [Caller(shared, seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(caller.run, num_calls) for caller in callers]:
            done.result(300)
    gc.collect()
    check_whole(shared)


def test_a_thread_serves_receivers_that_do_not_wait():
    shared, inbox, ends = shared_engine(), Inbox(), EndsInbox()
    thread = threading.Thread(target=shared.serve, args=(inbox,))
    thread.start()
    jobs = [generation([seed], 30, seed) for seed in range(9)]
    for job in jobs:
        shared.submit((job,), ends)
        inbox.put(WORK)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: Caller(shared, seed).run(5), range(2)))
    for _ in jobs:
        ends.get()
    for seed, job in enumerate(jobs):
        assert list(job.completion.token_ids) == plain_continuation([seed], seed, 30, set())
    inbox.put(STOP)
    thread.join(10)
    assert not thread.is_alive()
    check_whole(shared)


@given(st.lists(st.sampled_from("asncr"), max_size=30), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=60)
def test_any_order_of_calls_of_one_thread(calls, max_sequences, seed):
    """Any order of calls of one thread is right: a call for which no slot is free runs the thread's streams to their
    end."""
    shared, source = shared_engine(max_sequences), random.Random(seed)
    streams = []
    for call in calls:
        if call == "a":
            prompt, new, own = [source.randrange(50)], source.randint(1, 20), source.randrange(5)
            stream = TextStream(shared, generation(prompt, new, own))
            streams.append((stream, [], plain_continuation(prompt, own, new, set())))
            del stream
        elif call == "s":
            Caller(shared, seed).generate()
        elif call == "r":
            Caller(shared, seed).read()
        elif streams:
            stream, found, whole = source.choice(streams)
            if call == "n":
                found += next(stream).token_ids if len(found) < len(whole) else ()
                assert found == whole[: len(found)]
            else:
                streams = [each for each in streams if each[0] is not stream]
            del stream
    for stream, found, whole in streams:
        assert found + [token for piece in stream for token in piece.token_ids] == whole
    del streams
    check_whole(shared)


def test_a_cancelled_reading_gives_its_slot_back():
    shared, inbox, closed = shared_engine(1), Inbox(), []

    def work(slot, block_table):
        try:
            while True:
                yield
        finally:
            closed.append(slot)

    reading = Reading(8, work)
    shared.submit((reading,), inbox)
    done = EndsInbox()
    shared.submit((generation([1], 5),), done)
    threading.Timer(0.05, shared.cancel, ((reading,),)).start()
    assert shared.next(done)[1].reason == "length" and closed == [0]
    assert isinstance(shared.next(inbox)[1], Ended)
    check_whole(shared)


@pytest.mark.parametrize("closes", [False, True])
def test_a_reading_that_cannot_be_left_cleanly_ends_all_the_same(closes):
    shared, first, second = shared_engine(2), Inbox(), EndsInbox()

    def work(slot, block_table):
        try:
            while True:
                yield
        finally:
            raise OSError("the disk is full")

    reading, job = Reading(8, work), generation([1], 5)
    shared.submit((reading,), first)
    shared.submit((job,), second)
    assert shared.next(second)[1].reason == "length"
    if closes:
        shared.close()
        assert isinstance(shared.next(first)[1].error, ClosedError)
    else:
        shared.cancel((reading,))
        assert shared.next(first)[1].error is None
        check_whole(shared)


def test_a_forked_process_reads_no_stream_of_its_parent(monkeypatch):
    shared = shared_engine()
    streams = [TextStream(shared, generation([5], 12, seed)) for seed in (1, 2)]
    first = [next(stream).token_ids for stream in streams]
    own = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        with pytest.raises(ClosedError, match="forked"):
            next(streams[0])
        streams[0].close()
        assert not list(streams[0])
        shared.close()
    assert streams[0]._job.sequence.finish_reason is None and not shared.engine.executor.closed
    rest = [token for piece in streams[1] for token in piece.token_ids]
    assert [*first[1], *rest] == plain_continuation([5], 2, 12, set())


def test_a_reading_that_is_cancelled_before_it_is_submitted_never_begins():
    """A server's thread may cancel between a look at whether the client has left and the submission."""
    shared, inbox = shared_engine(1), Inbox()

    def work(slot, block_table):
        raise AssertionError("it has begun")

    reading = Reading(8, work)
    shared.cancel((reading,))
    shared.submit((reading,), inbox)
    assert shared.next(inbox) == (reading, Ended("done")) and reading.result is None
    check_whole(shared)


def test_a_reading_that_fails_tells_its_caller():
    shared, inbox = shared_engine(1), Inbox()

    def work(slot, block_table):
        yield
        raise ValueError("no such row")

    shared.submit((Reading(8, work),), inbox)
    assert str(shared.next(inbox)[1].error) == "no such row"
    check_whole(shared)


def test_what_a_token_costs_does_not_depend_on_how_many_wait():
    def seconds(count):
        shared = shared_engine(2)
        begun = time.thread_time()
        shared.run([generation([5, 6], 5) for _ in range(count)])
        return (time.thread_time() - begun) / count

    few = min(seconds(100) for _ in range(3))
    assert min(seconds(3000) for _ in range(2)) < 4 * few


def test_a_job_that_comes_after_the_command_to_close_ends_with_closed_error():
    shared, inbox = shared_engine(), EndsInbox()
    shared._lead.acquire()  # as if another thread drove the engine, so that commands wait
    jobs = [generation([1]), Reading(4, lambda slot, block_table: iter(()))]
    shared._commands.append(lambda: shared._run_close(Inbox(), Closed()))
    shared.submit(jobs, inbox)
    shared._lead.release()
    shared.cancel(())  # carries out what waits
    assert shared.engine.executor.closed
    for job in jobs:
        assert not inbox.is_empty()
        ended, end = inbox.get()
        assert ended is job and isinstance(end.error, ClosedError)


def test_a_thread_that_got_its_item_asleep_is_not_asked_to_drive():
    shared, inbox, job = shared_engine(), Inbox(), generation([1])
    shared._lead.acquire()
    inbox.put((job, Ended("stop")))
    assert shared._sleep(inbox)[0] is job and not shared._sleeping
    shared._lead.release()


def test_a_thread_does_not_sleep_where_nobody_drives():
    """The thread that drove may leave just before another one goes to sleep, and sees no sleeper to wake."""
    shared, inbox = shared_engine(), Inbox()
    found = []
    thread = threading.Thread(target=lambda: found.append(shared._sleep(inbox)), daemon=True)
    thread.start()
    thread.join(10)
    assert found == [LEAD] and not shared._sleeping


def test_the_lead_goes_on_to_another_sleeper_where_its_own_thread_has_what_it_waited_for():
    shared, other, job = shared_engine(), Inbox(), generation([1])

    class Served(Inbox):
        def __init__(self):
            self.is_empty = lambda: False

        def get(self):
            shared._lead.release()
            return job, Ended("stop")

    shared._lead.acquire()
    shared._sleeping[other] = None
    assert shared._sleep(served := Served())[0] is job and served not in shared._sleeping
    assert other.get() is LEAD


def test_the_lead_goes_on_to_a_sleeper_though_a_listener_ends_whoever_cancels():
    shared, other, inbox, job = shared_engine(run_ahead=1), Inbox(), EndsInbox(), generation([1], 90)

    def listener(step, result):
        if isinstance(step, Release):
            raise SystemExit(3)

    shared.engine.listener = listener
    shared.submit([job], inbox)
    while not job.sequence.token_ids:
        shared._run_step()
    shared._sleeping[other] = None
    with pytest.raises(SystemExit):
        shared.cancel([job])
    assert inbox.get()[1].reason == "cancelled"
    assert not other.is_empty() and other.get() is LEAD


def test_ctrl_c_does_not_wait_for_the_end_of_an_answer():
    shared, job = shared_engine(), generation([1], 200)
    num_steps = itertools.count(1)
    shared.engine.listener = lambda step, result: signal.raise_signal(signal.SIGINT) if next(num_steps) == 9 else None
    with pytest.raises(KeyboardInterrupt):
        shared.run([job])
    assert len(job.sequence.token_ids) < 20 and job.sequence.finish_reason == "cancelled"
    check_whole(shared)


def test_a_stream_whose_wait_was_interrupted_is_cancelled_while_somebody_holds_it():
    shared, job = shared_engine(), generation([1], 200)
    stream, num_steps = TextStream(shared, job), itertools.count(1)
    shared.engine.listener = lambda step, result: signal.raise_signal(signal.SIGINT) if next(num_steps) == 9 else None
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert job.sequence.finish_reason == "cancelled" and not list(stream)
    check_whole(shared)


def test_a_loan_of_a_tool_is_left_to_the_tool():
    shared = shared_engine()
    loan = shared.engine.borrow(8)
    shared.engine.advance()
    assert shared.engine.slots.loans == (loan,)
    job = generation([1, 2])
    shared.run([job])
    assert list(job.completion.token_ids) == plain_continuation([1, 2], 0, 12, set())
    assert shared.engine.slots.loans == (loan,)


def test_a_completion_has_its_reason_once_the_end_is_read():
    shared, inbox, job = shared_engine(), Inbox(), generation([1, 2])
    shared.submit((job,), inbox)
    while not isinstance(part := shared.next(inbox)[1], Ended):
        job.read(part)
    assert (job.completion.finish_reason, len(job.completion.token_ids)) == ("cancelled", 12)
    job.read(part)
    assert job.completion.finish_reason == part.reason == "length"
    assert 0 < part.queued_s < part.first_token_s
