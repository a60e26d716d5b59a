"""The reference executor against Hugging Face transformers: stored logits and greedy tokens (tests/golden)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference.golden_models import STORAGE_TOLERANCE, TINY, all_tokens, executor_for, golden, logits_of, relative
from reference.tiny_models import GOLDEN, make_executor, random_weights

from cpmrt import LLM
from cpmrt.config import ModelConfig, Sampling, SamplingParams
from cpmrt.dtypes import DType
from cpmrt.engine import Engine, Request
from cpmrt.executor import Executor
from cpmrt.models.decoder import tensor_specs

LOGIT_TOLERANCE = 1e-4


def greedy(executor: Executor, prompt: tuple[int, ...], count: int) -> list[int]:
    engine = Engine(executor)
    seq = engine.add(Request(prompt, Sampling(), seed=0, stop_token_ids=(), max_new_tokens=count))
    return [token for result in engine.stream(seq) for token in result.token_ids]


@pytest.mark.parametrize("chunk", [1, 7, 64, 96])
@pytest.mark.parametrize("name", TINY)
def test_logits(name, chunk):
    data = golden(name)
    token_ids = all_tokens(data)
    logits = logits_of(executor_for(name, chunk=chunk), token_ids)
    assert logits.shape == data["logits"].shape == (len(token_ids), 99)
    assert relative(logits, data["logits"]) < LOGIT_TOLERANCE
    per_position = np.linalg.norm(logits - data["logits"], axis=1) / np.linalg.norm(data["logits"], axis=1)
    assert per_position.max() < LOGIT_TOLERANCE
    assert np.abs(logits - data["logits"]).max() < LOGIT_TOLERANCE * np.abs(data["logits"]).max()


@pytest.mark.parametrize("chunk", [7, 64, 96])
@pytest.mark.parametrize("name", TINY)
def test_greedy_tokens(name, chunk):
    data = golden(name)
    prompt, expected = tuple(data["prompt_ids"].tolist()), data["greedy_ids"].tolist()
    assert greedy(executor_for(name, chunk=chunk), prompt, len(expected)) == expected


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", TINY)
def test_narrow_storage_stays_close(name, dtype):
    data = golden(name)
    logits = logits_of(executor_for(name, dtype=dtype, chunk=64), all_tokens(data))
    error = relative(logits, data["logits"])
    assert 1e-5 < error < STORAGE_TOLERANCE[dtype]


def test_a_wrong_model_is_noticed():
    """A model with the same weights but another rotary table is far outside the tolerance."""
    data = golden("rope_linear")
    config = json.loads(str(data["config"])) | {"rope_scaling": None}
    weights = random_weights(tensor_specs(ModelConfig.from_hf(config)), int(data["seed"]))
    executor = make_executor(ModelConfig.from_hf(config), weights)
    assert relative(logits_of(executor, all_tokens(data)), data["logits"]) > 100 * LOGIT_TOLERANCE


def test_every_file_is_here_and_margins_exceed_rounding():
    stored = {path.stem for path in GOLDEN.glob("*.npz")}
    assert stored == {*TINY, "demo", "gguf_blocks"}
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 1_500_000
    for name in TINY:
        data = golden(name)
        assert len(data["greedy_ids"]) >= 24
        assert data["margin"] > 1e-3
        metadata = json.loads(str(data["metadata"]))
        assert metadata["command"] == "python tools/make_golden.py tiny"
        assert {"torch", "transformers"} <= metadata.keys()


def test_cases_cover_every_spelling():
    configs = [json.loads(str(golden(name)["config"])) for name in TINY]
    sections = [config.get("rope_scaling") or config.get("rope_parameters") or {} for config in configs]
    assert {key for section in sections for key in section} >= {"type", "rope_type", "rope_theta"}
    keys = {key for config in configs for key in config}
    assert keys >= {"rope_scaling", "rope_theta", "rope_parameters", "torch_dtype", "dtype"}
    kinds = {section.get("rope_type", section.get("type")) for section in sections}
    assert kinds >= {"linear", "dynamic", "llama3", "yarn", "longrope", "su", "default"}


def test_readme_says_how_they_were_made():
    text = (GOLDEN / "README.md").read_text()
    for word in ("tools/make_golden.py tiny", "tools/make_golden.py demo", "transformers", "torch", "seed"):
        assert word in text
    assert [name for name in TINY if f"`{name}`" not in text] == []


def test_demo_model():
    data = golden("demo")
    with LLM(executor="reference", dtype="float32", max_context=512, prefill_chunk=48) as llm:
        for index in range(int(data["num_prompts"])):
            prompt, expected = data[f"prompt_ids_{index}"].tolist(), data[f"greedy_ids_{index}"].tolist()
            logits = llm.logits(prompt + expected)[data[f"positions_{index}"]]
            assert relative(logits, data[f"logits_{index}"]) < LOGIT_TOLERANCE
            params = SamplingParams(max_new_tokens=len(expected), ignore_eos=True)
            assert list(llm.generate(prompt, params).token_ids) == expected
