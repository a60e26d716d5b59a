"""A model with latent attention keeps every promise of the others: same bits in chunks, company, reuse and drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_checkpoint import DRAFT, HEADS, TARGET, eagle2_tensors, write_folder
from draft_checkpoint import VOCAB as VOCAB_OF_DRAFTS
from executors.repeatability_cases import accompanied, answer, equal_pages, logits_of, pages_of, reused_answers, text
from reference.tiny_models import random_weights, unpacked
from speculation_steps import SETTINGS, generate
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.config import EngineConfig, ModelConfig, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError
from cpmrt.models.decoder import tensor_specs
from cpmrt.reference.assembly import open_executor
from cpmrt.weights.model_folder import ModelFolder

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
    """A small draft model of another architecture with the same vocabulary."""
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
    """Drafts change no token and no bit of a logprob; prompts repeat themselves, so that lookups find something."""
    prompts = [text(20, seed, VOCAB) * 3 for seed in range(3)]
    with opener(checkpoint, dtype=dtype)() as llm:
        plain = [answer(llm, prompt) for prompt in prompts]
    for name in ("lookup", str(draft)):
        with opener(checkpoint, dtype=dtype)(draft=name) as llm:
            assert [answer(llm, prompt) for prompt in prompts] == plain, name


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A target whose vocabulary is so small that a random EAGLE draft is often right, and that draft."""
    root = tmp_path_factory.mktemp("small")
    sizes = {"num_key_value_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6}
    config = TARGET | {"architectures": ["MiniCPM3ForCausalLM"], "qk_rope_head_dim": 4, "v_head_dim": 8} | sizes
    specs = tensor_specs(ModelConfig.from_hf(config))
    write_folder(root / "target", config, unpacked(specs, random_weights(specs, 4)))
    write_folder(root / "eagle", DRAFT, eagle2_tensors("vllm"))
    return root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees_of_a_draft_change_no_bit(small, dtype):
    """Trees change no bit, also when accepted paths leave out nodes, so that latents move."""
    engine = {"executor": "reference", "prefill_chunk": 16, "max_context": 256, "memory_budget": 1 << 30}
    folder = ModelFolder.open(small / "target")
    shapes = (TreeShape(2, 4, 6), TreeShape(3, 2, 8), TreeShape(4, 2, 9))
    wish = {"speculation": SpeculationConfig("eagle2", shapes=shapes), "draft": str(small / "eagle")}
    plain = open_executor(folder, EngineConfig(**engine, dtype=dtype))[0]
    drafted, accepted = open_executor(folder, EngineConfig(**engine, dtype=dtype, **wish))[0], []
    for seed, sampling in enumerate(SETTINGS.values()):
        prompt = tuple(text(40 + 9 * seed, seed, VOCAB_OF_DRAFTS))
        found, lengths = generate(drafted, prompt, sampling, (0, 1, 2, "decode"), count=24)
        assert found == generate(plain, prompt, sampling, count=24)[0], seed
        accepted += lengths
    assert np.mean(accepted) > 1.02, "no draft was ever accepted, so nothing was tested"


def test_pages_in_fp8_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="kv_dtype of a model with latent attention"):
        opener(checkpoint)(kv_dtype="fp8")
