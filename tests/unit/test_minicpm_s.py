"""MiniCPM-S-1B: its activation through every command that reads a config, and the prompt of the first models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.bench.shapes import shape_config
from cpmrt.cli.main import main
from cpmrt.config import ModelConfig

FATRELU = {"hidden_act": "fatrelu", "hidden_act_param": 0.1}
# A template for the prompt that the model card shows: no roles, and a BOS that the tokenizer writes.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<用户>' + m.content.strip() + '<AI>' }}{% else %}"
    "{{ m.content.strip() }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_checkpoint(tmp_path_factory.mktemp("minicpm-s"), **FATRELU)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    (made / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return made


def logits(folder: Path, **settings: Any) -> Any:
    with LLM(folder, executor="reference", max_context=256, **settings) as llm:
        return llm.logits([1, 5, 9, 200, 17])


def test_the_prompt_is_the_question_between_its_markers_after_one_bos(folder: Path) -> None:
    said = (("user", " Hi "), ("assistant", "Yes"), ("user", "?"))
    talk = [{"role": role, "content": content} for role, content in said]
    with LLM(folder, executor="reference", max_context=256) as llm:
        ids = llm.chat_prompt(talk)
        assert llm.tokenizer.decode(ids, skip_special_tokens=False) == "<s><用户>Hi<AI>Yes<用户>?<AI>"
        assert ids[0] == 1 and ids.count(1) == 1
        params = SamplingParams(max_new_tokens=3, ignore_eos=True)
        assert llm.chat(talk, params).token_ids == llm.generate(ids, params).token_ids


def test_the_threshold_counts(folder: Path, tmp_path: Path) -> None:
    """The activation's threshold changes the logits; one that nothing reaches gives those of a model whose MLPs add
    zero."""
    first = logits(folder)
    assert np.abs(first - logits(folder, hf_overrides={"hidden_act": "silu"})).max() > 0.01
    assert np.abs(first - logits(folder, hf_overrides={"hidden_act_param": 0.5})).max() > 0.01
    closed = logits(folder, hf_overrides={"hidden_act_param": 1e4})
    dead = write_checkpoint(tmp_path / "dead", **FATRELU)
    assert np.isfinite(closed).all()
    tensors = load_file(dead / "model.safetensors")
    save_file({name: value * ("down_proj" not in name) for name, value in tensors.items()}, dead / "model.safetensors")
    np.testing.assert_array_equal(closed, logits(dead))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_it_can_be_quantised(folder: Path, tmp_path: Path, method: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the gates of a model that are open are few " * 200)
    calibration = ["--calibration", str(text), "--windows", "2", "--window", "64"] if method == "gptq" else []
    options = ["--method", method, "--group-size", "32", *calibration, "--quiet"]
    assert main(["quantize", str(folder), str(tmp_path / "out"), *options]) == 0
    exact, found = logits(folder), logits(tmp_path / "out")
    assert 0 < np.linalg.norm(found - exact) < 0.3 * np.linalg.norm(exact)


def test_the_plan_of_the_1b(capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig.from_hf(shape_config("minicpm-s-1b"))
    assert (config.num_layers, config.attention.head_dim, config.tie_word_embeddings) == (52, 64, True)
    assert main(["plan", "--shape", "minicpm-s-1b", "--context", "4096"]) == 0
    assert "layers" in capsys.readouterr().out
