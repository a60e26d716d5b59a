"""Files of tools/train_draft.py, without torch: writing them, reading them back, and the bundled drafts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tiny_checkpoint import write_checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from draft_training.files import (
    DraftConfig,
    check_taps,
    default_taps,
    read_draft,
    residual_scale,
    tensor_shapes,
    write_draft,
)

from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.dtypes import DType, round_to
from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.weights.draft_folder import DraftFolder, with_speculation
from cpmrt.weights.hub import BUNDLED
from cpmrt.weights.model_folder import ModelFolder

SIZES = DraftConfig("eagle2", 64, 96, 2, 1, 32, 259, 1e-6, 1.4 / 2**0.5)
BUNDLED_METHODS = ("eagle2", "eagle3")
METHODS = (*BUNDLED_METHODS, "dspark")
IDS = np.array([0, 1, 2, 5, 9, 40, 257, 258])


BLOCKS = DraftConfig("dspark", 64, 96, 2, 1, 32, 259, 1e-6, 1.0, (1,), 2, 5, 7, 12)


def drafted(method):
    """Return a draft for the tiny checkpoint: its config, random tensors, and the token ids of its head or None."""
    cut = replace(SIZES, method="eagle3", vocab_size=len(IDS), taps=(0, 1, 1))
    config = {"eagle2": SIZES, "eagle3": cut, "dspark": BLOCKS}[method]
    random = np.random.default_rng(3)
    shapes = tensor_shapes(config)
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return config, tensors, IDS if method == "eagle3" else None


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return ModelFolder.open(write_checkpoint(tmp_path_factory.mktemp("target") / "tiny", mup_denominator=2))


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_comes_back_as_it_was_rounded(method, target, tmp_path):
    config, tensors, ids = drafted(method)
    write_draft(tmp_path, config, target, tensors, ids)
    found, weights, names = read_draft(tmp_path)
    assert replace(found, residual_scale=0.0) == replace(config, residual_scale=0.0)
    assert residual_scale(target) == pytest.approx(1.4 / 2**0.5)
    assert found.residual_scale == pytest.approx(1.0 if method == "dspark" else 1.4 / 2**0.5)
    assert weights.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights[name], round_to(tensor, DType.BFLOAT16), err_msg=name)
    assert (names is None) if ids is None else np.array_equal(names, ids)


@pytest.mark.parametrize("method", METHODS)
def test_the_library_of_the_format_reads_names_types_and_maps(method, target, tmp_path):
    config, tensors, ids = drafted(method)
    write_draft(tmp_path, config, target, tensors, ids)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert types == dict.fromkeys(tensors, "BF16") | ({} if ids is None else {"d2t": "I64", "t2d": "BOOL"})
        for name in tensors:
            assert tuple(file.get_slice(name).get_shape()) == tensors[name].shape
        if ids is not None:
            assert np.array_equal(file.get_tensor("d2t") + np.arange(len(ids)), ids)
            assert np.array_equal(np.flatnonzero(file.get_tensor("t2d")), ids)
            assert file.get_slice("t2d").get_shape() == [259]


def test_names_are_those_of_published_drafts(target):
    attention = {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    layer = attention | {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    layer |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    outside = {"model.fc.weight", "model.input_norm1.weight", "model.input_norm2.weight"}
    assert tensor_shapes(SIZES).keys() == outside | {f"model.eagle_layers.0.{name}" for name in layer}
    layer |= {"hidden_norm.weight"}
    outside = {"fc.weight", "norm.weight", "lm_head.weight"}
    assert tensor_shapes(drafted("eagle3")[0]).keys() == outside | {f"midlayer.{name}" for name in layer}


@pytest.mark.parametrize("method", METHODS)
def test_the_runtime_takes_it_for_a_draft_of_the_target(method, target, tmp_path):
    config, tensors, ids = drafted(method)
    write_draft(tmp_path, config, target, tensors, ids)
    read = DraftFolder.open(str(tmp_path), target, SpeculationConfig(method, (TreeShape.chain(2),))).config
    assert (read.method, read.taps, read.draft_vocab) == (method, config.taps, config.vocab_size)
    assert read.has_input_norms is (method == "eagle2")
    assert read.decoder.residual_scale == pytest.approx(config.residual_scale)
    attention = read.decoder.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (2, 1, 32)
    assert read.decoder.rope == target.config.rope


def test_a_target_without_scales_gives_a_draft_without_scales(tmp_path):
    target = ModelFolder.open(write_checkpoint(tmp_path / "llama", architectures=["LlamaForCausalLM"]))
    config, tensors, _ = drafted("eagle2")
    write_draft(tmp_path / "draft", replace(config, residual_scale=1.0), target, tensors, None)
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert raw["architectures"] == ["EagleLlamaForCausalLM"]
    assert not raw.keys() & {"scale_emb", "scale_depth", "dim_model_base", "mup_denominator"}
    assert read_draft(tmp_path / "draft")[0].residual_scale == residual_scale(target) == 1.0


def test_wrong_tensors_are_refused_before_anything_is_written(target, tmp_path):
    config, tensors, _ = drafted("eagle2")
    for wrong in (
        {name: tensor for name, tensor in tensors.items() if "fc" not in name},
        tensors | {"model.fc.weight": tensors["model.fc.weight"].T},
        tensors | {"model.norm.weight": np.ones(64, np.float32)},
    ):
        with pytest.raises(ConfigError, match="draft tensors"):
            write_draft(tmp_path / "draft", config, target, wrong, None)
    assert not (tmp_path / "draft").exists()


def test_a_file_of_other_sizes_than_its_config_is_refused(target, tmp_path):
    config, tensors, _ = drafted("eagle2")
    write_draft(tmp_path, config, target, tensors, None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 95}))
    with pytest.raises(CheckpointError, match="gate_proj|up_proj|down_proj"):
        read_draft(tmp_path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not a draft"):
        read_draft(tmp_path)


def test_heads_and_taps_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="heads"):
        replace(SIZES, num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="method"):
        replace(SIZES, method="medusa")
    assert check_taps(default_taps(8), 8) == (2, 4, 5)
    for taps in (default_taps(2), (0, 1), (0, 1, 8)):
        with pytest.raises(ConfigError, match="taps"):
            check_taps(taps, 8 if taps[-1] == 8 else 2)


@pytest.mark.parametrize("method", BUNDLED_METHODS)
def test_bundled_drafts_are_drafts_of_the_bundled_model(method):
    model = ModelFolder.open(None)
    config, weights, ids = read_draft(BUNDLED / method)
    assert config.method == method
    assert DraftFolder.open(method, model, SpeculationConfig(method)).config.draft_vocab == config.vocab_size
    for name, tensor in weights.items():
        assert np.isfinite(tensor).all() and tensor.std() > 0, name
    if ids is not None:
        assert np.all(np.diff(ids) > 0) and ids[0] >= 0 and ids[-1] < model.config.vocab_size
        assert set(model.config.eos_token_ids) <= set(ids.tolist())


def test_bundled_drafts_take_at_most_four_megabytes():
    files = [path for method in BUNDLED_METHODS for path in (BUNDLED / method).rglob("*") if path.is_file()]
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) <= 4_000_000


def test_a_path_is_never_a_repository(target, monkeypatch, tmp_path):
    monkeypatch.setattr("cpmrt.weights.hub.find", lambda *_, **__: pytest.fail("it asked for a repository"))
    with pytest.raises(CheckpointError, match="an existing folder"):
        with_speculation(EngineConfig(), target, Path("org/name"))
    config, tensors, ids = drafted("eagle2")
    write_draft(tmp_path / "org" / "name", config, target, tensors, ids)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert with_speculation(EngineConfig(), target, Path("org/name")).speculation.method == "eagle2"
