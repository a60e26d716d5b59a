"""A prompt's bits depend on its tokens and the settings alone: not on chunks, reuse or company (NumPy executor)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.repeatability_cases import accompanied, answer, logits_of, reused_answers, text
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM

FORMATS: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"kv_dtype": "fp8"}, {"lm_head_bits": 4}]
VOCAB = 90


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


def test_an_answer_that_became_a_prompt_is_computed_again(checkpoint: Path) -> None:
    with LLM(checkpoint, executor="reference", max_context=512) as llm:
        prompt = text(100, 4, VOCAB)
        talk = [*prompt, *answer(llm, prompt)[0], 3]
        second = answer(llm, talk)
    with LLM(checkpoint, executor="reference", max_context=512) as llm:
        assert answer(llm, talk) == second
