"""An LLM on an event loop gives the answers of a blocking one, many at a time, and leaves nothing behind."""

import asyncio
import contextlib
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import AsyncMock, create_autospec

import numpy as np
import pytest
import timing
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, AsyncLLM, SamplingParams
from cpmrt.errors import ArgumentError, ClosedError, ContextLengthError, CpmrtError, DeviceError, RequestError
from cpmrt.executor import Decode

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint, executor="reference", max_sequences=3) as made:
        yield made


FORKED = """
import asyncio, os, sys
from cpmrt import AsyncLLM, ClosedError, LLM, SamplingParams

llm = AsyncLLM(LLM(sys.argv[1], executor="reference"))
few = SamplingParams(max_new_tokens=2)
asyncio.run(llm.generate("x", few))  # starts its threads, which a fork has not
if (child := os.fork()) == 0:
    for call in (llm.generate("x", few), anext(llm.stream("x", few)), llm.score("x")):
        try:
            asyncio.run(asyncio.wait_for(call, 5))
        except ClosedError as error:
            print(error)
    sys.stdout.flush()
    os._exit(0)
os.waitpid(child, 0)
"""


async def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


async def text_of(stream):
    return "".join([piece.text async for piece in stream])


def slow_step(*_):
    """Make steps slow, so that LONG answers are not over before a test leaves them."""
    time.sleep(0.02)


def is_whole(llm):
    return llm.shared.is_idle and len(llm.engine.slots.free) == 3 and not llm.engine.cache.pool.num_held


def test_a_forked_process_does_not_wait_for_threads_that_it_has_not(checkpoint):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(checkpoint)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert len(said) == 3 and all("forked" in line for line in said)


def test_every_method_gives_what_the_blocking_one_gives(llm):
    async def run():
        async with AsyncLLM(llm) as fast:
            pieces = [piece async for piece in fast.stream("abc", SAMPLED)]
            answers = await asyncio.gather(
                fast.generate("abc", SAMPLED), fast.generate(["a", "b"], SAMPLED), fast.chat(HI, SAMPLED),
                fast.chat([HI, HI], SAMPLED), fast.score("abc"), fast.logits("abc"), fast.embed("abc"),
                fast.embed(["a", "b"], pooling="last"),
            )  # fmt: skip
            return pieces, answers

    expected = (
        llm.generate("abc", SAMPLED), llm.generate(["a", "b"], SAMPLED), llm.chat(HI, SAMPLED),
        llm.chat([HI, HI], SAMPLED), llm.score("abc"), llm.logits("abc"), llm.embed("abc"),
        llm.embed(["a", "b"], pooling="last"),
    )  # fmt: skip
    pieces, answers = asyncio.run(run())
    assert "".join(piece.text for piece in pieces) == expected[0].text
    for answer, one in zip(answers[:4], expected[:4], strict=True):
        both = zip(answer, one, strict=True) if isinstance(one, list) else [(answer, one)]
        assert all(ours.token_ids == theirs.token_ids for ours, theirs in both)
    for answer, one in zip(answers[4:], expected[4:], strict=True):
        np.testing.assert_allclose(answer, one, atol=1e-5)


def test_seeds_have_the_order_of_the_calls(checkpoint, monkeypatch):
    """Seeds follow the order of the calls, not that of the threads; the first calls' threads take longest here."""
    free, own = (SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=seed) for seed in (None, 7))

    def calls(llm):
        return [
            llm.stream("slow", free), llm.generate(["slow", "abc", "a"], [free, own, free]), llm.generate("abc", free),
            llm.chat([HI, HI], free), llm.chat(HI, free),
        ]  # fmt: skip

    async def run(llm):
        async with AsyncLLM(llm) as fast:
            stream, *others = calls(fast)
            return texts(await asyncio.gather(*others)), await text_of(stream)

    def texts(answers):
        return [[each.text for each in one] if isinstance(one, list) else one.text for one in answers]

    with LLM(checkpoint, executor="reference", max_sequences=3) as llm:
        stream, *others = calls(llm)
        expected = texts(others), stream.finish().text
    with LLM(checkpoint, executor="reference", max_sequences=3) as llm:
        read = llm.maker.token_ids

        def slowly(prompt):
            time.sleep(0.1 * (prompt == "slow"))
            return read(prompt)

        monkeypatch.setattr(llm.maker, "token_ids", slowly)
        assert asyncio.run(run(llm)) == expected


def test_calls_share_steps_with_each_other_and_with_threads(checkpoint):
    """Answers asked for in the event loop and in another thread have steps in common once all three are there."""
    rows = []

    def listener(step, _):
        if isinstance(step, Decode):
            timing.until(lambda: rows or len(llm.shared._generations) + len(llm.shared._commands) >= num_asked, 20)
            rows.append(len(step.slots))

    async def run(llm):
        async with AsyncLLM(llm) as fast:
            thread = asyncio.to_thread(llm.generate, "t", LONG)
            return await asyncio.gather(thread, fast.generate("x", LONG), text_of(fast.stream("y", LONG)))

    with LLM(checkpoint, executor="reference", max_sequences=3, on_step=listener) as llm:
        num_asked = 1
        alone = [llm.generate(prompt, LONG).token_ids for prompt in "tx"]
        num_asked = 3
        rows.clear()
        found = asyncio.run(run(llm))
    assert [answer.token_ids for answer in found[:2]] == alone and max(rows) == 3


def test_a_cancelled_task_and_a_left_stream_free_their_slots(llm):
    llm.engine.listener = slow_step

    async def run():
        async with AsyncLLM(llm) as fast:
            task = asyncio.create_task(fast.generate("x", LONG))
            reading = asyncio.create_task(text_of(fast.stream("y", LONG)))
            await until(lambda: len(llm.engine.running) == 2)
            for each in (task, reading):
                each.cancel()
            async for _ in fast.stream("z", LONG):
                break
            async with fast.stream("w", LONG) as stream:
                await stream.__anext__()
            assert stream.completion.finish_reason == "cancelled"
            fast.stream("never read", LONG)
            gc.collect()
            await until(lambda: is_whole(llm))
            assert (await fast.generate("abc", SAMPLED)).finish_reason == "length"

    asyncio.run(run())


def test_a_stream_is_closed_as_a_generator_is(llm):
    async def read():
        serving = AsyncLLM(llm)
        async with contextlib.aclosing(serving.stream("one", LONG)) as stream:
            await anext(stream)
        await until(lambda: llm.shared.is_idle)
        return [piece async for piece in stream], stream.completion.finish_reason

    assert asyncio.run(asyncio.wait_for(read(), 30)) == ([], "cancelled")


def test_tasks_that_read_one_stream_get_each_piece_once(llm):
    async def run():
        async with AsyncLLM(llm) as fast:
            expected = (await fast.generate("abc", SAMPLED)).text
            stream = fast.stream("abc", SAMPLED)

            async def read():
                return [piece.text async for piece in stream]

            parts = await asyncio.wait_for(asyncio.gather(*(read() for _ in range(3))), 60)
            assert sorted("".join(map("".join, parts))) == sorted(expected) and stream.completion.text == expected
            await until(lambda: is_whole(llm))

    asyncio.run(run())


def test_closing_ends_what_waits(checkpoint):
    async def run():
        before = set(threading.enumerate())
        llm = LLM(checkpoint, executor="reference", on_step=slow_step)
        fast = AsyncLLM(llm)
        tasks = [asyncio.create_task(fast.generate(name, LONG)) for name in "ab"]
        await until(lambda: llm.engine.running)
        await fast.close()
        await fast.close()
        for task in tasks:
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await fast.score("abc")
        assert not [each for each in set(threading.enumerate()) - before if each.name == "cpmrt-engine"]

    asyncio.run(run())


def test_nothing_waits_for_a_free_thread_of_the_loop(checkpoint):
    async def run():
        held = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        fast = AsyncLLM(LLM(checkpoint, executor="reference"))
        preparing = asyncio.create_task(asyncio.to_thread(held.wait, 20))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(fast.generate("abc", SAMPLED), 10)
            await asyncio.wait_for(fast.close(), 10)
        finally:
            held.set()
        assert await preparing

    asyncio.run(run())


def test_a_forgotten_one_ends_its_thread(llm):
    async def run():
        fast = AsyncLLM(llm)
        assert (await fast.generate("abc", SAMPLED)).finish_reason == "length"
        return fast._thread

    thread = asyncio.run(run())
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and llm.generate("abc", SAMPLED).finish_reason == "length"


def test_a_stream_keeps_what_drives_it_until_its_end(llm):
    async def run():
        stream = AsyncLLM(llm).stream("abc", SAMPLED)
        fast = weakref.ref(stream._llm)
        text = await asyncio.wait_for(text_of(stream), 20)
        await until(lambda: fast() is None)
        return text, stream.completion.text

    text = llm.generate("abc", SAMPLED).text
    assert asyncio.run(run()) == (text, text)


def test_a_stream_that_is_closed_while_it_begins_ends_without_a_request(llm):
    async def run():
        stream = AsyncLLM(llm).stream("abc", LONG)
        reading = asyncio.create_task(text_of(stream))
        await asyncio.sleep(0)
        stream.close()
        assert await asyncio.wait_for(reading, 20) == "" and is_whole(llm)

    asyncio.run(run())


def test_errors_reach_their_callers(llm):
    async def run():
        async with AsyncLLM(llm) as fast:
            for call, error in (
                (fast.generate("x" * 300), ContextLengthError),
                (fast.generate(["a", b"b"]), RequestError),
                (fast.embed("a", pooling="max"), RequestError),
            ):
                with pytest.raises(error):
                    await call
            stream = fast.stream("abc", SamplingParams(n=2))
            assert stream.completion.finish_reason == "cancelled" and stream.completion.text == ""
            with pytest.raises(RequestError, match="SamplingParams.n: expected 1 for a stream"):
                await stream.__anext__()
            assert [piece async for piece in stream] == []
            with pytest.raises(ArgumentError, match="did you mean enable_thinking"):
                await fast.chat(HI, enable_thinkin=True)

    asyncio.run(run())
    with pytest.raises(CpmrtError, match="cannot be pickled"):
        pickle.dumps(AsyncLLM(llm))
    with pytest.raises(CpmrtError, match="a stream cannot be pickled"):
        pickle.dumps(AsyncLLM(llm).stream("a"))
    with pytest.raises(ArgumentError, match=r"AsyncLLM\(LLM\(model\)\)"):
        AsyncLLM("openbmb/MiniCPM4-0.5B")
    with pytest.raises(ArgumentError, match=r"no argument 'max_sequences'; pass it to the LLM: AsyncLLM\(LLM\(max_seq"):
        AsyncLLM("openbmb/MiniCPM4-0.5B", max_sequences=8)
    with pytest.raises(ArgumentError, match=r"AsyncLLM\(LLM\(max_context=...\)\)"):
        AsyncLLM(llm, max_model_len=8)


def test_a_stream_belongs_to_the_loop_that_has_begun_it(llm):
    stream = AsyncLLM(llm).stream("abc", LONG)
    asyncio.run(anext(stream))
    with pytest.raises(CpmrtError, match="begun in another event loop"):
        asyncio.run(anext(stream))
    stream.close()
    assert llm.generate("x", SamplingParams(max_new_tokens=2, ignore_eos=True)).finish_reason == "length"


def test_a_device_that_fails_to_close_leaves_no_thread(llm, monkeypatch):
    def fail():
        raise DeviceError("the device is lost")

    async def run():
        fast = AsyncLLM(llm)
        monkeypatch.setattr(llm.executor, "close", fail)
        with pytest.raises(DeviceError):
            await fast.close()
        return fast._thread

    assert not asyncio.run(run()).is_alive()


def test_its_methods_are_known_to_be_awaited():
    for name in ("generate", "chat", "logits", "score", "embed", "close"):
        assert inspect.iscoroutinefunction(getattr(AsyncLLM, name))
    assert not inspect.iscoroutinefunction(AsyncLLM.stream)
    assert isinstance(create_autospec(AsyncLLM).generate, AsyncMock)
