"""An output head in 8 bits as GPTQModel writes it with `lm_head=True`, beside layers in 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.quantised_models import raw_tensors, write_safetensors
from wide_head import CASE, GROUP, HIDDEN, RULE, VOCAB, head_numbers, settings, word_of, write_wide_head

from cpmrt import LLM
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import Quantization

IDS = list(range(3, 40))


def logits(folder: Path) -> Any:
    with LLM(folder, executor="reference", dtype="float32") as llm:
        return llm.logits(IDS)


def test_it_is_the_matrix_that_its_numbers_say(tmp_path: Path) -> None:
    """An 8-bit head gives the logits of a checkpoint with the same matrix in 32 bits."""
    codes, scales = head_numbers()
    matrix = (codes.astype(np.float32) - 128) * np.repeat(scales.astype(np.float32), GROUP, axis=1)
    plain = write_wide_head(tmp_path / "plain")
    tensors = {name: value for name, value in raw_tensors(CASE, 0).items() if not name.startswith("lm_head.")}
    write_safetensors(plain / "model.safetensors", tensors | {"lm_head.weight": ("F32", matrix)})
    found, expected = logits(write_wide_head(tmp_path / "wide")), logits(plain)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("of_settings", [{}, {"dynamic": None}, {"group_size": 128, "dynamic": {}}])
def test_its_tensors_say_that_it_is_in_8_bits(tmp_path: Path, of_settings: dict[str, Any]) -> None:
    if of_settings:  # without a rule the head has groups as large as the layers'
        codes, scales = head_numbers()
        zeros = np.ascontiguousarray(word_of(np.full((VOCAB, 1), 127, np.uint8)).T)
        changes = {
            "lm_head.scales": ("F16", np.ascontiguousarray(scales.T[:1])), "lm_head.qzeros": ("I32", zeros),
            "lm_head.g_idx": ("I32", np.zeros(HIDDEN, np.int32)),
        }  # fmt: skip
        folder = write_wide_head(tmp_path, changes, **of_settings)
    else:
        folder = write_wide_head(tmp_path)
    with LLM(folder, executor="reference") as llm:
        head = next(spec for spec in llm.plan.tensors if spec.name == "lm_head")
        assert head.quant == Quantization(8, 128 if of_settings else GROUP)
        assert llm.plan.region("lm_head.codes").nbytes == VOCAB * HIDDEN


def test_settings_alone_predict_what_the_checkpoint_has(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(CASE.config | {"quantization_config": settings()})
    predicted = {spec.name: spec.quant for spec in weight_specs(config, EngineConfig())}
    with LLM(write_wide_head(tmp_path), executor="reference") as llm:
        assert predicted == {spec.name: spec.quant for spec in llm.plan.tensors}
    assert predicted["lm_head"] == Quantization(8, GROUP)


def test_what_contradicts_it_is_refused(tmp_path: Path) -> None:
    zeros = np.ascontiguousarray(word_of(np.full((VOCAB, HIDDEN // GROUP), 99, np.uint8)).T)
    with pytest.raises(CheckpointError, match="lm_head.qzeros.*expected zero points of 128, got 100"):
        logits(write_wide_head(tmp_path / "zeros", {"lm_head.qzeros": ("I32", zeros)}))
    order = ("I32", np.roll(np.arange(HIDDEN) // GROUP, 5).astype(np.int32))
    with pytest.raises(UnsupportedModelError, match="'lm_head': an output head in 8 bits.*act-order"):
        logits(write_wide_head(tmp_path / "order", {"lm_head.g_idx": order}))
    with pytest.raises(ConfigError, match="lm_head_bits.*quantised in the checkpoint"):
        LLM(write_wide_head(tmp_path / "twice"), executor="reference", lm_head_bits=8)
    wrong = RULE | {"lm_head": RULE["lm_head"] | {"group_size": 31}}
    with pytest.raises(ConfigError, match="dynamic: lm_head: group_size: expected -1"):
        ModelConfig.from_hf(CASE.config | {"quantization_config": settings(dynamic=wrong)})
