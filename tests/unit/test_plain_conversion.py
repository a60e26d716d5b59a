"""`cpmrt convert --to safetensors` on quantised checkpoints: its output loads as plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.quantised_models import CASES, write_quantised
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.weights.model_folder import ModelFolder


def logits(folder: Path) -> Any:
    with LLM(folder, executor="reference", dtype="float32", max_context=64) as llm:
        return llm.logits([1, 5, 9, 200, 17])


def plain(folder: Path, target: Path) -> Path:
    """Run `cpmrt convert --to safetensors`, check that the config names no quantisation, and return the new folder."""
    assert main(["convert", str(folder), str(target), "--to", "safetensors"]) == 0
    assert ModelFolder.open(target).config.quantization is None
    return target


@pytest.mark.parametrize("name", ["gptq_asymmetric", "compressed", "compressed_asymmetric"])
def test_settings_under_either_name_or_in_a_file_of_their_own_are_left_out(tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    folder = write_quantised(case, tmp_path / "quantised", 1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    np.testing.assert_allclose(logits(plain(folder, tmp_path / "plain")), logits(folder), atol=1e-3)


@pytest.mark.parametrize("is_inside", [False, True])
def test_settings_beside_or_within_a_nested_config_are_left_out(tmp_path: Path, is_inside: bool) -> None:
    model = write_checkpoint(tmp_path / "model", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    folder = tmp_path / "quantised"
    assert main(["quantize", str(model), str(folder), "--method", "rtn", "--group-size", "32"]) == 0
    (folder / "quantize_config.json").unlink()
    inner = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["MiniCPMV"], "version": 4.5, "torch_dtype": "float32", "text_config": inner}
    if not is_inside:
        outer["quantization_config"] = inner.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(outer))
    np.testing.assert_allclose(logits(plain(folder, tmp_path / "plain")), logits(folder), atol=1e-3)
