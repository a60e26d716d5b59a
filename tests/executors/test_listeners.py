"""What a listener (`on_step`) raises reaches a caller or the log; it ends no thread and cuts no answer silently."""

from __future__ import annotations

import asyncio

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, AsyncLLM, SamplingParams
from cpmrt.executor import Decode

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


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
            return await asyncio.wait_for(llm.generate("x", PARAMS), 5)

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
