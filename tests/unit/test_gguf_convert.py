"""Checkpoints become GGUF files, and GGUF files checkpoints: blocks, keys, names and bits."""

import json
import shutil
from dataclasses import replace

import gguf_models as models
import numpy as np
import pytest
from safetensors.numpy import load_file

from cpmrt import LLM, SamplingParams
from cpmrt.cli.main import main
from cpmrt.dtypes import DType, from_float32
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError
from cpmrt.quantization.gguf_blocks import QUANTISERS, quantise_rows
from cpmrt.quantization.gguf_conversion import FILE_TYPES, to_gguf
from cpmrt.quantization.plain_conversion import to_safetensors
from cpmrt.text import Tokenizer
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.hub import BUNDLED
from cpmrt.weights.model_folder import ModelFolder

ERRORS = {
    "Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.039, "Q5_1": 0.038, "Q5_0": 0.043, "Q4_K": 0.076, "Q4_1": 0.075,
    "Q4_0": 0.085, "IQ4_NL": 0.079, "IQ4_XS": 0.079, "Q3_K": 0.152, "Q2_K": 0.28, "TQ2_0": 0.83,
}  # fmt: skip
"""The greatest relative root mean squared error of each block type on normally distributed weights."""


def normal(rows=64, columns=512):
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32) * np.float32(0.03)


@pytest.mark.parametrize("name", QUANTISERS)
def test_error_of_normal_weights(name):
    values = normal()
    found = BLOCK_TYPES[name].values(quantise_rows(name, values))
    assert np.sqrt(np.mean((found - values) ** 2)) / values.std() < ERRORS[name]


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_error_is_no_larger_than_that_of_the_package(name):
    gguf = pytest.importorskip("gguf")
    values, kind = normal(), gguf.GGMLQuantizationType[name]
    found = gguf.dequantize(quantise_rows(name, values), kind)
    theirs = gguf.dequantize(gguf.quantize(values, kind), kind)
    assert np.mean((found - values) ** 2) <= np.mean((theirs - values) ** 2)


@pytest.mark.parametrize("name", QUANTISERS)
def test_what_a_type_can_say_stays_nearly_as_it_is(name):
    """Values that came from blocks are quantised to nearly the same values again, up to the rounding of scales."""
    kind = BLOCK_TYPES[name]
    values = kind.values(quantise_rows(name, normal()))
    found = kind.values(quantise_rows(name, values))
    assert np.sqrt(np.mean((found - values) ** 2)) < 0.02 * values.std()


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("fill", [0.0, 1.0, -1.0, 1e-6, 60000.0, -60000.0])
def test_rows_of_one_value(name, fill):
    values = np.full((2, 512), fill, np.float32)
    rows = quantise_rows(name, values)
    assert BLOCK_TYPES[name].all_finite(rows)
    np.testing.assert_allclose(BLOCK_TYPES[name].values(rows), values, rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in QUANTISERS if BLOCK_TYPES[name].bits >= 4])
def test_one_large_weight_and_one_sign(name):
    values = normal(4)
    values[0, 7] = 5.0
    values[1] = np.abs(values[1])
    values[2] = -np.abs(values[2])
    found = BLOCK_TYPES[name].values(quantise_rows(name, values))
    assert abs(found[0, 7] - 5) < 0.5 and np.isfinite(found).all()
    for row in (1, 2):
        assert np.sqrt(np.mean((found[row] - values[row]) ** 2)) < 0.15 * values[row].std() + 0.02 * 0.03


@pytest.mark.parametrize("architecture", models.CONFIGS)
def test_there_and_back_keeps_every_bit(tmp_path, architecture):
    """A checkpoint in bfloat16 becomes a GGUF file of bfloat16 and the same checkpoint again."""
    source = models.write_pair(tmp_path, architecture, lambda name: "BF16").folder
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    folder = ModelFolder.open(source)
    to_gguf(folder, tmp_path / "made.gguf", "bf16")
    made = ModelFolder.open(tmp_path / "made.gguf")
    to_safetensors(made, tmp_path / "back")
    for config in (made.config, ModelFolder.open(tmp_path / "back").config):
        rope = config.rope  # the file states LongRoPE's attention factor, which the source folder leaves to its rule
        assert replace(config, rope=replace(rope, attention_factor=None)) == folder.config
    expected = load_file(source / "model.safetensors")
    with Checkpoint.open(tmp_path / "back") as found:
        assert found.entries.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found.view(name), from_float32(values, DType.BFLOAT16), err_msg=name)
    assert Tokenizer.open(tmp_path / "back").encode("abc ü") == Tokenizer.open(source).encode("abc ü")


@pytest.mark.parametrize("architecture", ["minicpm", "minicpm3"])
def test_a_file_has_the_scales_of_the_model(tmp_path, architecture):
    pair = models.write_pair(tmp_path, architecture, lambda name: "BF16")
    scales = {"scale_emb": 5.0, "scale_depth": 1.0, "dim_model_base": 128}
    config = json.loads((pair.folder / "config.json").read_text()) | scales
    (pair.folder / "config.json").write_text(json.dumps(config))
    folder = ModelFolder.open(pair.folder)
    to_gguf(folder, tmp_path / "made.gguf", "bf16")
    made = ModelFolder.open(tmp_path / "made.gguf").config
    names = ("scale_emb", "residual_scale", "logit_divisor")
    assert [getattr(made, name) for name in names] == [getattr(folder.config, name) for name in names]


def first_tier(names, first):
    """Return the names as cases, of which only those in `first` run in the first tier."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.all) for name in names]


@pytest.mark.parametrize("kind", first_tier(FILE_TYPES, ("bf16", "q8_0", "q4_k")))
def test_a_file_made_here_runs_as_its_weights(tmp_path, kind):
    """A converted file gives the logits of its weights as the gguf package dequantises them."""
    gguf = pytest.importorskip("gguf")
    pair = models.write_pair(tmp_path, "minicpm", lambda name: "F32")
    to_gguf(ModelFolder.open(pair.folder), tmp_path / "made.gguf", kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    weights = {}
    for name, values in load_file(pair.folder / "model.safetensors").items():
        tensor = tensors.pop(models.gguf_name(name))
        assert tensor.tensor_type.name == ("F32" if values.ndim == 1 else wanted(kind, name))
        read = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        weights[name] = models.unpaired(read, 2) if "q_proj" in name or "k_proj" in name else read
        if values.ndim == 1 or BLOCK_TYPES.get(FILE_TYPES[kind].matrices, BLOCK_TYPES["Q8_0"]).bits >= 4:
            assert np.abs(weights[name] - values).max() < 0.15 * np.abs(values).max()
    assert set(tensors) == {"rope_factors_long.weight", "rope_factors_short.weight"}
    models.save_file(weights, pair.folder / "model.safetensors")
    scores = []
    for model in (tmp_path / "made.gguf", pair.folder):
        with LLM(model, executor="reference", dtype="float32", max_context=128) as llm:
            scores.append(llm.score("Every good boy deserves fudge."))
    np.testing.assert_allclose(*scores, rtol=0, atol=2e-4)


def wanted(kind, name):
    return FILE_TYPES[kind].head if name == "lm_head.weight" else FILE_TYPES[kind].matrices


def test_keys_are_those_that_llama_cpp_requires(tmp_path):
    gguf = pytest.importorskip("gguf")
    to_gguf(ModelFolder.open(BUNDLED), tmp_path / "demo.gguf", "q4_k")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "demo.gguf").fields.items()}
    config = ModelFolder.open(BUNDLED).config
    assert fields["general.architecture"] == "minicpm" and fields["general.file_type"] == 14
    assert fields["general.quantization_version"] == 2 and fields["minicpm.block_count"] == config.num_layers
    assert fields["minicpm.attention.head_count_kv"] == config.attention.num_kv_heads
    assert fields["minicpm.residual_scale"] == pytest.approx(config.residual_scale, rel=1e-6)
    lists = [fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    assert {len(values) for values in lists} == {config.vocab_size}
    assert fields["tokenizer.ggml.model"] == "llama" and "im_start" in fields["tokenizer.chat_template"]


def test_the_bundled_model_says_the_same_from_a_file(tmp_path):
    to_gguf(ModelFolder.open(BUNDLED), tmp_path / "demo.gguf", "bf16")
    answers = []
    for model in (None, tmp_path / "demo.gguf"):
        with LLM(model, executor="reference", max_context=256) as llm:
            chat = [{"role": "user", "content": "What does os.path.join do?"}]
            answers.append(llm.chat(chat, SamplingParams(max_new_tokens=12)).token_ids)
    assert answers[0] == answers[1]


def test_a_gptq_checkpoint_becomes_a_file_and_a_plain_folder(tmp_path):
    assert main(["quantize", "demo", str(tmp_path / "gptq"), "--method", "rtn", "--group-size", "64"]) == 0
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "a.gguf"), "--to", "gguf", "--type", "q8_0"]) == 0
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "plain"), "--to", "safetensors"]) == 0
    found = []
    for model in ("gptq", "a.gguf", "plain"):
        with LLM(tmp_path / model, executor="reference", dtype="float32", max_context=128) as llm:
            found.append(llm.score("def read_lines(path):\n    with open(path) as file:"))
    assert np.abs(found[2] - found[0]).max() < 0.1 and np.abs(found[1] - found[0]).max() < 0.3


@pytest.mark.parametrize("name", ["a.gguf", "A.GGUF"])
def test_the_name_of_the_file_says_the_format(tmp_path, name):
    assert main(["convert", "demo", str(tmp_path / name), "--type", "Q8_0"]) == 0
    assert ModelFolder.open(tmp_path / name).config.attention == ModelFolder.open(BUNDLED).config.attention


@pytest.mark.parametrize(("kind", "value", "words"), [
    ("q4_0", 70000.0, "0.mlp.up_proj.weight' stored as Q4_0: expected finite values up to 65504, got 70000"),
    ("f16", -70000.0, "stored as F16: expected finite values up to 65504, got 70000"), ("bf16", 70000.0, None),
    ("bf16", np.inf, "stored as BF16: expected finite values up to 3.38953e+38, got inf"),
    ("bf16", 3.4e38, "stored as BF16: expected finite values up to 3.38953e+38, got 3.4e+38"),
    ("q8_0", np.nan, "got nan"),
])  # fmt: skip
def test_a_weight_that_cannot_be_stored_is_refused(tmp_path, kind, value, words):
    """A weight beyond its type in the file would become infinity there, and nobody could use the file."""
    pair = models.write_pair(tmp_path, "llama", lambda name: "F32")
    weights = load_file(pair.folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    models.save_file(weights, pair.folder / "model.safetensors")
    if words is None:
        to_gguf(ModelFolder.open(pair.folder), tmp_path / "made.gguf", kind)
        return
    with pytest.raises(CheckpointError) as found:
        to_gguf(ModelFolder.open(pair.folder), tmp_path / "made.gguf", kind)
    assert words in str(found.value) and not (tmp_path / "made.gguf").exists()


def test_what_is_not_ternary_is_told(tmp_path, caplog):
    """Converting weights that are not ternary to ternary blocks warns, as they become noise; ternary ones give no
    warning."""
    to_gguf(ModelFolder.open(BUNDLED), tmp_path / "plain.gguf", "tq2_0")
    assert "48 matrices are not" in caplog.text and "q2_k" in caplog.text
    caplog.clear()
    folder = shutil.copytree(BUNDLED, tmp_path / "ternary")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:begin]).items():
        if "proj" in name:  # bfloat16: every value keeps its sign
            first, last = (begin + offset for offset in entry["data_offsets"])
            words = np.frombuffer(raw, "<u2", (last - first) // 2, first)
            words[:] = words & 0x8000 | 0x3C00
    (folder / "model.safetensors").write_bytes(raw)
    to_gguf(ModelFolder.open(folder), tmp_path / "ternary.gguf", "tq2_0")
    assert "are not" not in caplog.text


@pytest.mark.parametrize("options", [["--method", "rtn"], ["--method", "ternary"]])
def test_a_file_is_not_quantised_before_it_is_a_folder(tmp_path, options, capsys):
    pair = models.write_pair(tmp_path, "llama", lambda name: "BF16", num_hidden_layers=1)
    assert main(["quantize", str(pair.gguf), str(tmp_path / "out"), *options]) == 1
    assert "is a GGUF file: expected a folder of safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mistakes_leave_nothing_behind(tmp_path):
    folder = ModelFolder.open(BUNDLED)
    (tmp_path / "there.gguf").write_bytes(b"")
    for target, words in (
        (tmp_path / "there.gguf", "exists already"), (tmp_path / "no" / "a.gguf", "is not a folder"),
        (tmp_path / "model.bin", "a name that ends with .gguf"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            to_gguf(folder, target, "q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]
    assert main(["convert", str(BUNDLED), str(tmp_path / "x"), "--type", "q8_0"]) != 0


@pytest.mark.parametrize("mlp", [
    {"hidden_act": "fatrelu", "hidden_act_param": 0.1}, {"num_experts": 4, "num_experts_per_tok": 2},
])  # fmt: skip
def test_an_mlp_without_keys_is_refused(tmp_path, mlp):
    pair = models.write_pair(tmp_path, "minicpm", lambda name: "F32")
    config = json.loads((pair.folder / "config.json").read_text()) | mlp
    (pair.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="mlp of a GGUF file: expected gated with SiLU"):
        to_gguf(ModelFolder.open(pair.folder), tmp_path / "a.gguf", "q8_0")
    assert not (tmp_path / "a.gguf").exists()
