"""Models from GGUF files on the CUDA executor agree with the same weights from safetensors and with NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models as models
import numpy as np
import pytest
from reference.golden_models import relative

from cpmrt import LLM, SamplingParams
from cpmrt.weights.formats.blocks import BLOCK_TYPES

SETTINGS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128}
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
PROMPT = np.random.default_rng(0).integers(3, 259, 90).tolist()
ARCHITECTURES = ("llama", "minicpm", "qwen2", "qwen3")


def answers(model: Path, dtype: str, executor: str = "cuda") -> tuple[Any, list[int]]:
    with LLM(model, executor=executor, dtype=dtype, **SETTINGS) as llm:
        params = SamplingParams(max_new_tokens=16, ignore_eos=True)
        return llm.logits(PROMPT), llm.generate(PROMPT[:70], params).token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["BF16", "F16", "mixed"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(tmp_path: Path, architecture: str, kind: str, dtype: str) -> None:
    pair = models.write_pair(tmp_path, architecture, models.mixed if kind == "mixed" else lambda name: kind)
    found, tokens = answers(pair.gguf, dtype)
    assert relative(found, answers(pair.gguf, dtype, "reference")[0]) < TOLERANCE[dtype]
    if kind != "mixed":  # the same 16-bit weights: the same bits
        expected, expected_tokens = answers(pair.folder, dtype)
        np.testing.assert_array_equal(found, expected)
        assert tokens == expected_tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_type(tmp_path: Path, kind: str) -> None:
    """Every block type is near the reference and near its values rounded to 16 bits; the head is tied."""
    pair = models.write_pair(tmp_path, "llama", lambda name: kind, tie_word_embeddings=True)
    found, _ = answers(pair.gguf, "bfloat16")
    assert relative(found, answers(pair.gguf, "bfloat16", "reference")[0]) < TOLERANCE["bfloat16"]
    assert relative(found, answers(pair.folder, "bfloat16")[0]) < TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_another_type_is_noticed(tmp_path: Path) -> None:
    """Weights of another seed are outside the tolerance."""
    one = models.write_pair(tmp_path / "one", "llama", lambda name: "Q4_0")
    other = models.write_pair(tmp_path / "other", "llama", lambda name: "Q4_0", seed=1)
    found = [answers(pair.gguf, "bfloat16")[0] for pair in (one, other)]
    assert relative(*found) > TOLERANCE["bfloat16"]
