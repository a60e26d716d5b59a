"""A model with latent attention keeps every promise of the others: same bits in chunks, company, reuse and drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from executors.repeatability_cases import accompanied, answer, equal_pages, logits_of, pages_of, reused_answers, text
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.errors import ConfigError

LATENT: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "head_dim": None,
}  # fmt: skip
VOCAB = 90
FORMATS: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"dtype": "float16", "lm_head_bits": 4}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("latent"), **LATENT)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A small model of another kind with the same vocabulary."""
    return write_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


def opener(checkpoint, **form):
    return lambda **settings: LLM(checkpoint, **{"executor": "reference", "max_context": 512} | form | settings)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_chunks_change_no_bit_of_the_logits(checkpoint, form):
    open_llm, prompt = opener(checkpoint, **form), text(270, 1, VOCAB)
    whole = logits_of(open_llm, prompt, prefill_chunk=512)
    for chunk in (31, 64, 100):
        assert np.array_equal(logits_of(open_llm, prompt, prefill_chunk=chunk), whole), chunk


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reuse_and_company_change_no_bit_of_an_answer(checkpoint, form):
    open_llm, prompts = opener(checkpoint, **form), [text(150 + 20 * number, number, VOCAB) for number in range(3)]
    with open_llm() as llm:
        alone = [answer(llm, prompt) for prompt in prompts]
    assert reused_answers(open_llm, prompts[0], (0, 64, 128)) == alone[:1] * 3
    assert accompanied(open_llm, prompts) == alone


def test_chunks_and_reuse_change_no_bit_of_a_page(checkpoint):
    open_llm, prompt = opener(checkpoint), text(140, 3, VOCAB)
    with open_llm(prefill_chunk=256) as llm:
        whole = pages_of(llm, prompt)
        assert set(whole) == {"latent_pages"} and whole["latent_pages"].shape == (2, 2, 1, 64, 32)
    with open_llm(prefill_chunk=33) as llm:
        llm.generate([*prompt[:70], 5], SamplingParams(max_new_tokens=1))
        assert equal_pages(pages_of(llm, prompt), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_bit_of_an_answer(checkpoint, draft, dtype):
    """Prompts that repeat themselves, so that lookup finds something; logprobs are compared exactly."""
    prompts = [text(20, seed, VOCAB) * 3 for seed in range(3)]
    with opener(checkpoint, dtype=dtype)() as llm:
        plain = [answer(llm, prompt) for prompt in prompts]
    for name in ("lookup", str(draft)):
        with opener(checkpoint, dtype=dtype)(draft=name) as llm:
            assert [answer(llm, prompt) for prompt in prompts] == plain, name


def test_pages_in_fp8_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="kv_dtype of a model with latent attention"):
        opener(checkpoint)(kv_dtype="fp8")
