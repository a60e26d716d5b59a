"""What a listener (`on_step`) raises reaches a caller or the log; it ends no thread and cuts no answer silently."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, AsyncLLM, SamplingParams
from cpmrt.executor import Decode, Release

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
GREEDY = replace(PARAMS, temperature=0)
RAISED = pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_one_that_wants_to_end_the_program_leaves_the_thread_of_an_event_loop_alone(checkpoint, caplog, error):
    def listener(step, _):
        if isinstance(step, Decode):
            raise error

    async def run():
        async with AsyncLLM(LLM(checkpoint, executor="reference", on_step=listener)) as llm:
            return await asyncio.wait_for(llm.generate("x", PARAMS), 30)

    assert len(asyncio.run(run()).token_ids) == 6
    assert type(error).__name__ in caplog.text


def test_a_stream_does_not_take_its_stop_iteration_for_the_end_of_the_answer(checkpoint):
    steps = iter(range(3))
    with LLM(checkpoint, executor="reference", on_step=lambda *_: next(steps)) as llm:
        stream = llm.stream("x", PARAMS)
        with pytest.raises(RuntimeError, match="a listener raised StopIteration"):
            list(stream)
        assert stream.completion.finish_reason == "cancelled"
        assert list(stream) == []


@RAISED
def test_one_that_raises_at_a_stop_string_costs_no_answer_a_token(checkpoint, caplog, error):
    """Two answers end with the same step: one at a stop string, whose slot is released then, and one at its length."""
    with LLM(checkpoint, executor="reference") as llm:
        text = llm.generate("x", GREEDY).text
        wishes = [replace(GREEDY, stop=[text[:3]]), replace(GREEDY, max_new_tokens=3)]
        expected = [llm.generate("x", wish).token_ids for wish in wishes]
        assert [len(token_ids) for token_ids in expected] == [3, 3]

    def listener(step, _):
        if isinstance(step, Release):
            raise error

    async def run():
        async with AsyncLLM(LLM(checkpoint, executor="reference", on_step=listener)) as llm:
            calls = [llm.generate("x", wish) for wish in wishes]
            return await asyncio.wait_for(asyncio.gather(*calls), 30)

    assert [answer.token_ids for answer in asyncio.run(run())] == expected
    assert type(error).__name__ in caplog.text


@RAISED
def test_one_that_raises_at_every_step_leaves_nothing_of_the_call_behind(checkpoint, error):
    def listener(step, _):
        if isinstance(step, (Decode, Release)):
            raise error

    with LLM(checkpoint, executor="reference", on_step=listener, max_sequences=3) as llm:
        with pytest.raises(type(error)):
            llm.generate(["x", "y", "z"], replace(PARAMS, max_new_tokens=64))
        assert llm.shared.is_idle
