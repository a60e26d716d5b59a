"""Texts are the same with and without the prefix cache: branching conversations, eviction, templates, penalties."""

import pytest
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
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import ConfigError
from cpmrt.executor import Admit

TEMPLATES = ("<|im_start|>{}\n{}<|im_end|>\n", "<{}>{}")
SHORT = SamplingParams(max_new_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def open_llm(checkpoint, **settings):
    return LLM(checkpoint, **{"executor": "reference", "max_context": 512} | settings)


@pytest.fixture(scope="module")
def whole(checkpoint):
    with open_llm(checkpoint, prefix_cache=False) as llm:
        outs = branching(llm)
    assert cached(outs) == [0] * len(outs)
    return texts(outs)


@pytest.mark.parametrize("chunk", [33, 512])
def test_branching_conversations_in_fp8(checkpoint, chunk):
    with open_llm(checkpoint, kv_dtype="fp8", prefix_cache=False) as llm:
        alone = texts(branching(llm))
    with open_llm(checkpoint, kv_dtype="fp8", prefill_chunk=chunk) as llm:
        outs = branching(llm)
    assert texts(outs) == alone and cached(outs) == BRANCHING_CACHED


@pytest.mark.parametrize("chunk", [33, 512])
@pytest.mark.parametrize(("reuse", "expected"), [(True, BRANCHING_CACHED), ("fast", BRANCHING_CACHED_FAST)])
def test_branching_conversations(checkpoint, whole, chunk, reuse, expected):
    with open_llm(checkpoint, prefill_chunk=chunk, prefix_cache=reuse) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and cached(outs) == expected
        assert llm.engine.cache.pool.num_held == 0


def test_eviction_under_pressure(checkpoint, whole):
    """Texts are right when four pages cannot hold everything that the conversations leave in the cache."""
    with open_llm(checkpoint, max_context=256) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and 0 < sum(cached(outs)) < sum(BRANCHING_CACHED)
        pool = llm.engine.cache.pool
        assert (pool.num_held, pool.num_cached + pool.num_free) == (0, 4)


def test_streams_together_share_pages(checkpoint):
    prompts = [[*START, tail, tail + 1] for tail in (20, 30, 40)]
    with open_llm(checkpoint, prefix_cache=False) as llm:
        alone = [llm.generate(prompt, params).token_ids for prompt in prompts for params in (GREEDY, PENALISED)]
    with open_llm(checkpoint, max_sequences=3) as llm:
        llm.generate(START, GREEDY)
        streams = [llm.stream(prompt, params) for prompt in prompts for params in (GREEDY, PENALISED)]
        outs = [stream.finish() for stream in streams]
    assert texts(outs) == alone and cached(outs) == [64] * 6


@pytest.mark.parametrize("reuse", [True, "fast"])
def test_the_second_turn_of_a_chat_prefills_what_is_new_and_the_answer_unless_that_is_reused(checkpoint, reuse):
    log = []
    ask = [{"role": "user", "content": "What are pages of sixty-four tokens good for? " * 2}]
    with open_llm(checkpoint, on_step=lambda *record: log.append(record), prefix_cache=reuse) as llm:
        first = llm.chat(ask, GREEDY)
        prompt = [*llm.chat_prompt(ask), *first.token_ids, *llm.tokenizer.encode("[user]And then?[bot]")]
        log.clear()
        second = llm.generate(prompt, GREEDY)
    written = len(first.token_ids) - 1 if reuse == "fast" else 0
    reused = (first.stats.prompt_tokens + written) // 64 * 64
    assert second.stats.cached_tokens == reused == (128 if reuse == "fast" else 64)
    assert num_prefilled(log) == len(prompt) - reused


@pytest.mark.parametrize("template", TEMPLATES)
def test_turns_under_a_template(checkpoint, template):
    """Turns under a template reuse the earlier prompt's pages: each prompt begins with the one before."""
    talk = [("user", "a" * 70), ("assistant", "b" * 70), ("user", "c")]
    prompts = ["".join(template.format(*turn) for turn in talk[:count]) for count in (1, 2, 3)]
    with open_llm(checkpoint) as llm, open_llm(checkpoint, prefix_cache=False) as plain:
        outs = [llm.generate(prompt, SHORT) for prompt in prompts]
        assert texts(outs) == texts([plain.generate(prompt, SHORT) for prompt in prompts])
    assert cached(outs) == [0, *(out.stats.prompt_tokens // 64 * 64 for out in outs[:-1])]


def test_the_same_words_under_two_templates(checkpoint):
    prompts = [template.format("user", "a" * 130) for template in TEMPLATES] * 2
    with open_llm(checkpoint) as llm, open_llm(checkpoint, prefix_cache=False) as plain:
        outs = [llm.generate(prompt, SHORT) for prompt in prompts]
        assert texts(outs) == texts([plain.generate(prompt, SHORT) for prompt in prompts])
    assert cached(outs) == [0, 0, 128, 128]


def test_scoring_writes_to_no_page_of_others(checkpoint, whole):
    """Scoring changes no running answer, in a cache of two sequences' pages from which it evicts what was cached."""
    with open_llm(checkpoint, max_context=256, max_sequences=2) as llm:
        first = llm.generate(START, GREEDY)
        with llm.stream([*START, *first.token_ids, 40, 41, 42], SAMPLED) as stream:
            next(stream)
            scores = llm.score((START * 3)[:256])
            assert stream.finish().token_ids == whole[1]
        assert llm.score((START * 3)[:256]).tolist() == scores.tolist()


@pytest.mark.parametrize("table", [(0, 8), (-1,), tuple(range(8)) + (0,)])
def test_a_block_table_past_the_pages_is_refused(checkpoint, table):
    with open_llm(checkpoint) as llm, pytest.raises(ConfigError, match="block table"):
        llm.executor.submit(Admit(0, GREEDY.with_defaults(), 0, 1, (), table))
