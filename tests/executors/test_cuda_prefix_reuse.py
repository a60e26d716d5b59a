"""The prefix cache on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.reuse_cases import (
    BRANCHING_CACHED,
    BRANCHING_CACHED_FAST,
    GREEDY,
    PENALISED,
    SAMPLED,
    START,
    branching,
    cached,
    num_prefilled,
    texts,
)

from cpmrt import LLM
from cpmrt.engine.step_log import replay
from cpmrt.executor import Recall

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("minicpm"), BASE | ROWS["minicpm"])


def open_llm(checkpoint, **settings):
    """Open the model with room for every page of `branching`."""
    usual = {"executor": "cuda", "max_context": 256, "max_sequences": 4, "prefill_chunk": 64}
    return LLM(checkpoint, **usual | settings)


@pytest.fixture(scope="module")
def whole(checkpoint):
    with open_llm(checkpoint, prefix_cache=False) as llm:
        outs = branching(llm)
    assert cached(outs) == [0] * len(outs)
    return texts(outs)


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"prefill_chunk": 33}], ids=str)
def test_branching_conversations_bit_by_bit(checkpoint, whole, settings):
    log = []
    with open_llm(checkpoint, on_step=lambda *record: log.append(record), **settings) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and cached(outs) == BRANCHING_CACHED
    assert num_prefilled(log) == sum(out.stats.prompt_tokens for out in outs) - sum(BRANCHING_CACHED)
    assert any(isinstance(step, Recall) for step, _ in log), "penalised prompts were reused"
    with open_llm(checkpoint, **settings) as llm:
        assert list(replay([step for step, _ in log], llm.executor)) == log


def test_eviction_under_pressure(checkpoint, whole):
    with open_llm(checkpoint, max_sequences=1) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and 0 < sum(cached(outs)) < sum(BRANCHING_CACHED)


def test_streams_together_share_pages(checkpoint):
    """Streams that share pages are right with more sequences than slots, some cancelled with steps in flight."""
    prompts = [[*START, tail, tail + 1] for tail in (20, 30, 40)]
    wanted = [(prompt, params) for prompt in prompts for params in (GREEDY, PENALISED, SAMPLED)]
    with open_llm(checkpoint, prefix_cache=False) as llm:
        alone = [llm.generate(*one).token_ids for one in wanted]
    with open_llm(checkpoint, max_sequences=3) as llm:
        llm.generate(START, GREEDY)
        for _ in range(3):
            streams = [llm.stream(*one) for one in wanted]
            next(streams[1])
            streams[1].close()
            streams[4].close()
            outs = [stream.finish() for index, stream in enumerate(streams) if index not in (1, 4)]
            assert texts(outs) == [tokens for index, tokens in enumerate(alone) if index not in (1, 4)]
            assert min(cached(outs)) >= 64
        assert llm.engine.cache.pool.num_held == 0


def test_scoring_writes_to_no_page_of_others(checkpoint, whole):
    with open_llm(checkpoint, max_sequences=2) as llm:
        first = llm.generate(START, GREEDY)
        with llm.stream([*START, *first.token_ids, 40, 41, 42], SAMPLED) as stream:
            next(stream)
            scores = llm.score((START * 3)[:256])
            assert stream.finish().token_ids == whole[1]
        np.testing.assert_array_equal(llm.score((START * 3)[:256]), scores)


def test_pages_of_answers_round_differently_and_no_more_than_that(checkpoint):
    with open_llm(checkpoint, prefix_cache="fast") as llm:
        assert cached(branching(llm)) == BRANCHING_CACHED_FAST
    with open_llm(checkpoint, prefill_chunk=512, prefix_cache="fast") as llm:
        prompt = [*START, *llm.generate(START, GREEDY).token_ids, 40]
        out = llm.generate(prompt, replace(GREEDY, max_new_tokens=1, logprobs=1))
        assert out.stats.cached_tokens == 128
        expected = llm.score([*prompt, *out.token_ids])[-1]
        np.testing.assert_allclose(out.logprobs[0].logprob, expected, atol=0.02)
