"""A prompt's bits depend on its tokens and the settings alone: not on chunks, reuse or company (NumPy executor)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.repeatability_cases import accompanied, answer, equal_pages, logits_of, pages_of, reused_answers, text
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams

FORMATS: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"lm_head_bits": 4}]
VOCAB = 90
PROMPT = text(140, 3, VOCAB)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_chunks_change_no_bit_of_the_logits(checkpoint: Path, form: dict[str, Any]) -> None:
    def open_llm(**settings: Any) -> LLM:
        return LLM(checkpoint, **{"executor": "reference", "max_context": 512} | form | settings)

    prompt = text(270, 1, VOCAB)
    whole = logits_of(open_llm, prompt, prefill_chunk=512)
    for chunk in (31, 64, 100):
        assert np.array_equal(logits_of(open_llm, prompt, prefill_chunk=chunk), whole), chunk
    for length in (1, 65, 258):
        assert np.array_equal(logits_of(open_llm, prompt[:length], prefill_chunk=512), whole[:length]), length


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reuse_and_company_change_no_bit_of_an_answer(checkpoint: Path, form: dict[str, Any]) -> None:
    def open_llm(**settings: Any) -> LLM:
        return LLM(checkpoint, **{"executor": "reference", "max_context": 512} | form | settings)

    prompts = [text(150 + 20 * number, number, VOCAB) for number in range(3)]
    with open_llm() as llm:
        alone = [answer(llm, prompt) for prompt in prompts]
        assert [answer(llm, prompt) for prompt in prompts] == alone
    assert reused_answers(open_llm, prompts[0], (0, 64, 100, 128)) == alone[:1] * 4
    assert reused_answers(open_llm, prompts[0], (70,), prefill_chunk=33) == alone[:1]
    assert accompanied(open_llm, prompts) == alone


@pytest.fixture(scope="module", params=FORMATS[:3], ids=str)
def form_and_pages(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings, and the keys and values of PROMPT computed in one chunk with them."""
    settings = {"executor": "reference", "max_context": 192} | request.param
    with LLM(checkpoint, prefill_chunk=256, **settings) as llm:
        return settings, pages_of(llm, PROMPT)


@settings(max_examples=5)
@given(chunk=st.integers(1, 140), reused=st.integers(0, 139))
def test_chunks_and_reuse_change_no_bit_of_keys_and_values(
    checkpoint: Path, form_and_pages: tuple[dict[str, Any], dict[str, Any]], chunk: int, reused: int
) -> None:
    form, whole = form_and_pages
    with LLM(checkpoint, prefill_chunk=chunk, **form) as llm:
        llm.generate([*PROMPT[:reused], 5], SamplingParams(max_new_tokens=1))
        assert equal_pages(pages_of(llm, PROMPT), whole)


def test_an_answer_that_became_a_prompt_is_computed_again(checkpoint: Path) -> None:
    with LLM(checkpoint, executor="reference", max_context=512) as llm:
        prompt = text(100, 4, VOCAB)
        talk = [*prompt, *answer(llm, prompt)[0], 3]
        second = answer(llm, talk)
    with LLM(checkpoint, executor="reference", max_context=512) as llm:
        assert answer(llm, talk) == second
