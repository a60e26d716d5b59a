"""Models with recurrent states on a GPU: near the oracle and the reference executor, and the same bits however a text
comes about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from executors.cuda_models import Agreement, write_model
from executors.hybrid_checkpoint import write_hybrid
from executors.reuse_cases import BRANCHING_CACHED, BRANCHING_CACHED_FAST, branching, cached, texts
from reference.golden_models import relative
from reference.hybrid_models import HYBRID, executor_for, golden, model, settings_of, tokens

from cpmrt import LLM, SamplingParams
from cpmrt.config import ModelConfig
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.cuda.step.memory import check_supported
from cpmrt.dtypes import DType
from cpmrt.engine.step_log import replay
from cpmrt.errors import UnsupportedModelError

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GOLDEN_TOLERANCE = {DType.BFLOAT16: 1e-1, DType.FLOAT16: 2e-2}
REFERENCE_TOLERANCE = {DType.BFLOAT16: 4e-2, DType.FLOAT16: 6e-3}
"""Tolerances against the reference, with room for choices of blocks that differ by rounding."""
LOGPROB_TOLERANCE = {DType.BFLOAT16: 0.3, DType.FLOAT16: 0.05}
NEAR = SamplingParams(max_new_tokens=24, logprobs=MAX_LOGPROBS, ignore_eos=True)
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=60, temperature=1.0, seed=7, ignore_eos=True)
LONG = [5 + i * i % 89 for i in range(300)]
LOOP = [*range(40, 60)] * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


def open_llm(folder: Any, **settings: Any) -> LLM:
    usual = {"executor": "cuda", "dtype": "bfloat16", "max_context": 640, "prefill_chunk": 128}
    return LLM(folder, **usual | settings)


def answers(folder: Any, **settings: Any) -> list[Any]:
    with open_llm(folder, **settings) as llm:
        return [llm.generate(text, params).token_ids for text in (LONG, LOOP) for params in (GREEDY, SAMPLED)]


@pytest.fixture(scope="module")
def plain(folder):
    return answers(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", HYBRID)
def test_a_golden_model(tmp_path, name, dtype):
    """Logits of every position are near the stored ones, and greedy steps near those that the reference replays."""
    data, steps = golden(name), []
    folder, settings = write_model(tmp_path, settings_of(name), model(name)[1]), {"dtype": dtype.label}
    with LLM(folder, executor="cuda", on_step=lambda *record: steps.append(record), max_context=512, **settings) as llm:
        logits = llm.logits(tokens(name))
        llm.generate(data["prompt_ids"].tolist(), NEAR)
        llm.generate(data["prompt_ids"].tolist()[:70], NEAR)
    assert relative(logits[data["positions"]], data["logits"]) < GOLDEN_TOLERANCE[dtype]
    reference = executor_for(name, dtype=dtype, prefill_chunk=512, max_context=512)
    expected = np.concatenate(list(reference.prompt_logits(0, tokens(name))))
    assert relative(logits, expected) < REFERENCE_TOLERANCE[dtype]
    agreement = Agreement(steps, replay([step for step, _ in steps], reference))
    assert agreement.compared >= 10 and agreement.worst < LOGPROB_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_chunk": 64}, {"prefill_chunk": 200}, {"cuda_graphs": False}, {"dependent_launch": False},
        {"cuda_graphs": False, "dependent_launch": False}, {"max_sequences": 4}, {"max_context": 512},
        {"steps_per_launch": 4}, {"draft": "lookup"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_change_no_bit(folder, plain, settings):
    assert answers(folder, **settings) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_small_model_drafts_and_changes_no_token(folder, dtype):
    with open_llm(folder, draft=folder / "draft", dtype=dtype) as llm:
        drafted = [llm.generate(LOOP, params) for params in (GREEDY, SAMPLED)]
    with open_llm(folder, dtype=dtype) as llm:
        assert texts(drafted) == texts([llm.generate(LOOP, params) for params in (GREEDY, SAMPLED)])


@pytest.mark.gpu
def test_texts_together_are_texts_alone(folder, plain):
    with open_llm(folder, max_sequences=3) as llm:
        assert texts(llm.generate([LONG, LONG, LOOP, LOOP], [GREEDY, SAMPLED] * 2)) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [64, 512])
def test_conversations_that_branch(folder, chunk):
    with open_llm(folder, prefix_cache=False) as llm:
        whole = texts(branching(llm))
    with open_llm(folder, prefill_chunk=chunk) as llm:
        outs = branching(llm)
        assert texts(outs) == whole and cached(outs) == BRANCHING_CACHED


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 4])
def test_the_state_within_an_answer(folder, steps):
    """The state kept within an answer is plain decoding's: a prompt that ends there goes on as the answer did."""
    settings = {"prefix_cache": "fast", "steps_per_launch": steps, "max_sequences": 2, "dtype": "float16"}
    with open_llm(folder, **settings) as llm:
        outs = branching(llm)
        assert cached(outs) == BRANCHING_CACHED_FAST
        first = llm.generate(LOOP, GREEDY)
        answered = [*LOOP, *first.token_ids]
        again = llm.generate(answered[:-4], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert again.token_ids == first.token_ids[-4:] and again.stats.cached_tokens == 192


@pytest.mark.gpu
def test_keys_and_values_in_8_bits(folder):
    """With pages in fp8 and states in float32 logits change, but not much."""
    with open_llm(folder) as llm:
        expected = llm.logits(LONG)
    with open_llm(folder, kv_dtype="fp8") as llm:
        assert 1e-4 < relative(llm.logits(LONG), expected) < 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lightning_head_dim": 96}, "lightning_head_dim: expected 64 or 128, got 96"),
        ({"mixer_types": ["lightning-attn"] * 3}, "no layer has grouped attention"),
        ({"head_dim": 32}, "head_dim: expected 64, 96 or 128"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take(changes, message):
    config = ModelConfig.from_hf(settings_of("lightning_first"))
    check_supported(config)
    with pytest.raises(UnsupportedModelError, match=message):
        check_supported(ModelConfig.from_hf(settings_of("lightning_first") | changes))
