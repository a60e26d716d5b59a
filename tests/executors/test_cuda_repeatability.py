"""A prompt's bits depend on its tokens and the settings alone: not on chunks, reuse or company (on a GPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.cuda_models import BASE, ROWS, write_model
from executors.repeatability_cases import (
    SAMPLED,
    Open,
    accompanied,
    answer,
    equal_pages,
    logits_of,
    pages_of,
    reused_answers,
    text,
)

from cpmrt import LLM
from cpmrt.bench.shapes import blocks_config

pytestmark = pytest.mark.gpu

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
SPARSE = {"topk": 4, "init_blocks": 1, "window_size": 128, "dense_len": 256}
LATENT: dict[str, Any] = ROWS["minicpm3"]
FORMATS: dict[str, dict[str, Any]] = {
    "bundled": {"model": None},
    "bundled-eagle2": {"model": None, "draft": "eagle2"},
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "int4": {"load_format": "dummy", "hf_overrides": {"quantization_config": GPTQ}},
    "ternary": {
        "load_format": "dummy", "hf_overrides": {"quantization_config": {"quant_method": "ternary", "group_size": 64}},
    },
    "Q4_1": {"load_format": "dummy", "hf_overrides": {"quantization_config": blocks_config("Q4_1")}},
    "fatrelu": {"hf_overrides": {"hidden_act": "fatrelu", "hidden_act_param": 0.1}},
    "fp8": {"kv_dtype": "fp8"},
    "sparse": {"sparse": SPARSE},
    "lookup": {"draft": "lookup"},
    "experts": {"load_format": "dummy", "hf_overrides": EXPERTS},
    "int4 experts": {"load_format": "dummy", "hf_overrides": EXPERTS | {"quantization_config": GPTQ}},
    "latent": {"load_format": "dummy", "hf_overrides": LATENT},
    "latent-int4-lookup": {
        "hf_overrides": LATENT | {"quantization_config": GPTQ}, "load_format": "dummy", "draft": "lookup",
    },
}
VOCAB = BASE["vocab_size"]
LONGEST = 2048
SIZES = {"intermediate_size": 256, "max_position_embeddings": LONGEST}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("minicpm"), BASE | ROWS["minicpm"] | SIZES
    )  # fmt: skip


@pytest.fixture(params=FORMATS)
def open_llm(request: pytest.FixtureRequest, checkpoint: Path) -> Open:
    form = FORMATS[request.param]

    def opened(**settings: Any) -> LLM:
        return LLM(**{"model": checkpoint, "executor": "cuda", "max_context": LONGEST} | form | settings)

    return opened


def test_chunks_change_no_bit_of_the_logits(open_llm: Open) -> None:
    prompt = text(1500, 1, VOCAB)
    whole = logits_of(open_llm, prompt, prefill_chunk=2048)
    for chunk in (33, 64, 65, 128, 200, 512, 1024):
        assert np.array_equal(logits_of(open_llm, prompt, prefill_chunk=chunk), whole), chunk
    with open_llm(prefill_chunk=2048) as llm:
        for length in (1, 2, 63, 64, 65, 128, 129, 700):
            assert np.array_equal(llm.logits(prompt[:length]), whole[:length]), length


def test_chunks_offsets_and_reuse_change_no_bit_of_keys_and_values(open_llm: Open) -> None:
    prompt = text(650, 2, VOCAB)
    with open_llm(prefill_chunk=2048) as llm:
        whole = pages_of(llm, prompt)
    assert all(array.any() for array in whole.values())
    for chunk in (1, 33, 64, 100, 512, 4096):
        with open_llm(prefill_chunk=chunk, max_sequences=2) as llm:
            # Some pages are reused. The token behind the last one is the same, as an EAGLE draft's row depends on it.
            llm.generate([*prompt[: 3 * chunk % 600 + 1], 5], SAMPLED)
            with llm.stream(text(300, 9, VOCAB), SAMPLED) as other:  # another sequence decodes beside it
                next(other)
                assert equal_pages(pages_of(llm, prompt), whole), chunk


def test_reuse_and_company_change_no_bit_of_an_answer(open_llm: Open) -> None:
    prompts = [text(330 + 150 * number, number, VOCAB) for number in range(8)]
    with open_llm() as llm:
        alone = [answer(llm, prompt) for prompt in prompts]
        assert [answer(llm, prompt) for prompt in prompts] == alone
    assert reused_answers(open_llm, prompts[3], (0, 64, 100, 257, 700)) == alone[3:4] * 5
    assert reused_answers(open_llm, prompts[3], (70,), prefill_chunk=100) == alone[3:4]
    assert accompanied(open_llm, prompts) == alone


def test_an_answer_that_became_a_prompt_is_computed_again(open_llm: Open) -> None:
    prompt = text(100, 4, VOCAB)
    with open_llm() as llm:
        talk = [*prompt, *answer(llm, prompt)[0], 3]
        second = answer(llm, talk)
    with open_llm() as llm:
        assert answer(llm, talk) == second
