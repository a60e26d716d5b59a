"""`cpmrt quantize` and `cpmrt convert` on tiny checkpoints: their output, reading it back, and their refusals."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from threadpoolctl import threadpool_limits
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.cli.main import main
from cpmrt.config import ModelConfig
from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.models.rope import rope_table
from cpmrt.quantization.calibration import read_texts, token_windows
from cpmrt.quantization.decoder_layer import DOWN, OUTPUT, STAGES, DecoderLayer
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.text import Tokenizer
from cpmrt.weights.safetensors import SafetensorsFile

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
IDS = list(range(3, 43))


@pytest.fixture(scope="module", autouse=True)
def one_blas_thread():
    """Run BLAS on one thread: products this small take longer on several, and much longer on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose linear layers have whole groups of 128 columns."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", **SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A calibration file."""
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"def f{n}(x):\n    return x * {n * n}\n" for n in range(60)))
    return path


def quantised(model, text, folder, *options):
    """Run `cpmrt quantize` and return the folder it makes."""
    calibration = () if "rtn" in options else ("--calibration", str(text), "--windows", "4", "--window", "64")
    assert main(["quantize", str(model), str(folder), *calibration, *options]) == 0
    return folder


def logits(folder):
    with LLM(folder, executor="reference", dtype="float32", max_context=64) as llm:
        return llm.logits(IDS)


def dequantised(folder, group_size, awq=False, but=None):
    """Return the weights of a quantised folder, dequantised as the formats' papers and code define them.

    `but` names a module that is left out.
    """
    stored = load_file(folder / "model.safetensors")
    weights = {name: value for name, value in stored.items() if not name.rpartition(".")[2].startswith(("q", "s", "g"))}
    for name in stored:
        module, _, suffix = name.rpartition(".")
        if suffix != "qweight" or module == but:
            continue
        words, zeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        shifts = 4 * np.arange(8)
        unpacked_zeros = (zeros[:, :, None] >> shifts) & 15
        if awq:
            order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
            codes = ((words[:, :, None] >> shifts) & 15)[:, :, order].reshape(len(words), -1)
            zero = unpacked_zeros[:, :, order].reshape(len(zeros), -1)
            group = np.arange(len(codes)) // group_size
        else:
            codes = ((words[:, None, :] >> shifts[:, None]) & 15).reshape(-1, words.shape[1])
            zero = unpacked_zeros.reshape(len(zeros), -1) + 1
            group = stored[f"{module}.g_idx"]
        values = (codes - zero[group]).astype(np.float32) * scales.astype(np.float32)[group]
        weights[f"{module}.weight"] = np.ascontiguousarray(values.T)
    return weights


def plain_logits(model, weights, folder):
    """Return the logits of the same model with these weights in a plain checkpoint."""
    folder.mkdir()
    for path in model.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(weights, folder / "model.safetensors")
    return logits(folder)


@pytest.mark.parametrize(("options", "awq"), [
    (("--method", "rtn"), False),
    (("--method", "rtn", "--asymmetric", "--group-size", "32"), False),
    (("--method", "gptq", "--group-size", "-1"), False),
    (("--method", "gptq", "--act-order", "--group-size", "32"), False),
    (("--method", "gptq", "--format", "awq"), True),
    (("--method", "awq", "--format", "awq", "--group-size", "64"), True),
])  # fmt: skip
def test_a_quantised_checkpoint_is_the_model_with_its_dequantised_weights(model, text, tmp_path, options, awq):
    folder = quantised(model, text, tmp_path / "out", *options)
    group_size = int(options[options.index("--group-size") + 1]) if "--group-size" in options else 128
    found = logits(folder)
    np.testing.assert_allclose(
        found, plain_logits(model, dequantised(folder, group_size, awq), tmp_path / "plain"), atol=2e-4
    )
    exact = logits(model)
    assert 0 < np.abs(found - exact).mean() < 0.4 * exact.std()


def test_the_config_says_how_and_the_rest_goes_along(model, text, tmp_path):
    folder = quantised(model, text, tmp_path / "out", "--act-order")
    config = json.loads((folder / "config.json").read_text())
    section = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    assert section == json.loads((folder / "quantize_config.json").read_text())
    expected = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True, "lm_head": False,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    assert expected.items() <= section.items()
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    stored, original = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    linears = {name for stage in STAGES for name in stage}
    kept = [name for name in original if name.removesuffix(".weight").partition("layers.")[2][2:] not in linears]
    assert len(kept) == 2 + 2 * 2
    for name in kept:
        np.testing.assert_array_equal(stored[name], original[name])
    assert not list(tmp_path.glob(".out.*"))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_the_head_on_request(text, tmp_path, method, capsys):
    model = write_checkpoint(tmp_path / "untied", **SIZES, vocab_size=264, tie_word_embeddings=False)
    folder = quantised(model, text, tmp_path / "out", "--method", method, "--lm-head")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["lm_head"] is True
    weights = dequantised(folder, 128)
    assert weights["lm_head.weight"].shape == (264, 128)
    np.testing.assert_allclose(logits(folder), plain_logits(model, weights, tmp_path / "plain"), atol=2e-4)
    tied = write_checkpoint(tmp_path / "tied", **SIZES, vocab_size=264)
    assert main(["quantize", str(tied), str(tmp_path / "no"), "--method", "rtn", "--lm-head"]) == 1
    assert "--lm-head-bits" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "group"), [
    (("--method", "rtn"), 128), (("--method", "gptq", "--group-size", "32"), 32),
    (("--method", "rtn", "--asymmetric", "--format", "gptq_v2", "--group-size", "-1"), 128),
])  # fmt: skip
def test_the_head_in_8_bits_on_request(text, tmp_path, options, group):
    model = write_checkpoint(tmp_path / "untied", **SIZES, vocab_size=264, tie_word_embeddings=False)
    folder = quantised(model, text, tmp_path / "out", *options, "--lm-head", "8")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    size = -1 if "-1" in options else group
    assert section["lm_head"] is True and section["bits"] == 4
    assert section["dynamic"] == {"lm_head": {"bits": 8, "group_size": size, "sym": True, "desc_act": False}}
    stored = load_file(folder / "model.safetensors")
    codes = stored["lm_head.qweight"].astype("<i4").T.copy().view(np.uint8).reshape(264, 128)  # four in a word
    zeros = stored["lm_head.qzeros"].astype("<i4").view(np.uint8)
    assert (zeros == (128 if "gptq_v2" in options else 127)).all() and codes.min() >= 1
    scales = np.repeat(stored["lm_head.scales"].astype(np.float32).T, group, axis=1)
    head = (codes.astype(np.float32) - 128) * scales
    original = load_file(model / "model.safetensors")["lm_head.weight"]
    assert (np.abs(head - original) <= 0.501 * scales).all()
    with LLM(folder, executor="reference", dtype="float32", max_context=64) as llm:
        assert next(spec.quant.bits for spec in llm.plan.tensors if spec.name == "lm_head") == 8
        found = llm.logits(IDS)
    if "--asymmetric" not in options:
        weights = dequantised(folder, group, but="lm_head") | {"lm_head.weight": head}
        expected = plain_logits(model, weights, tmp_path / "plain")
        np.testing.assert_allclose(found, expected, atol=2e-4)


def test_awq_settings(model, text, tmp_path):
    folder = quantised(model, text, tmp_path / "out", "--method", "rtn", "--format", "awq")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "awq" and section["version"] == "gemm" and section["zero_point"] is True
    assert not (folder / "quantize_config.json").exists()
    with SafetensorsFile.open(folder / "model.safetensors") as file:
        assert not [name for name in file.entries if name.endswith("g_idx")]


@pytest.mark.parametrize("config", [
    {},
    {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    {"hidden_act": "fatrelu", "hidden_act_param": 0.1},
])  # fmt: skip
def test_the_calibration_forward_is_that_of_the_executor(tmp_path, config):
    folder = write_checkpoint(tmp_path / "tiny", **SIZES, **config)
    settings = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    stream = weights["model.embed_tokens.weight"][IDS] * np.float32(settings.scale_emb)
    rope = rope_table(settings, settings.attention.head_dim, len(IDS), len(IDS))
    for index in range(settings.num_layers):
        prefix = f"model.layers.{index}."
        tensors = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        layer = DecoderLayer(settings, tensors, rope)
        stream = layer.after(DOWN, layer.after(OUTPUT, stream))
    normalised = stream / np.sqrt(np.square(stream).mean(-1, keepdims=True) + settings.rms_norm_eps)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    found = (normalised * weights["model.norm.weight"]) @ head.T / np.float32(settings.logit_divisor)
    np.testing.assert_allclose(found, logits(folder), atol=1e-4)


@pytest.mark.parametrize("group_size", ["128", "-1"])
def test_marlin_and_back_gives_the_same_bytes(model, text, tmp_path, group_size):
    folder = quantised(model, text, tmp_path / "gptq", "--method", "rtn", "--group-size", group_size)
    assert main(["convert", str(folder), str(tmp_path / "marlin")]) == 0
    assert main(["convert", "--to", "gptq", str(tmp_path / "marlin"), str(tmp_path / "back")]) == 0
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    np.testing.assert_allclose(logits(tmp_path / "marlin"), logits(folder), atol=1e-5)


def test_marlin_files_are_those_of_cpm_cu(model, text, tmp_path):
    folder = quantised(model, text, tmp_path / "gptq", "--method", "rtn")
    assert main(["convert", str(folder), str(tmp_path / "marlin")]) == 0
    stored = load_file(tmp_path / "marlin" / "model_gptq.safetensors")
    prefix = "model.layers.1."
    assert {name.removeprefix(prefix) for name in stored if name.startswith(prefix)} == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.qkv_proj.qweight",
        "self_attn.qkv_proj.scales", "self_attn.o_proj.qweight", "self_attn.o_proj.scales", "mlp.gate_up_proj.qweight",
        "mlp.gate_up_proj.scales", "mlp.down_proj.qweight", "mlp.down_proj.scales",
    }  # fmt: skip
    assert stored[prefix + "self_attn.qkv_proj.qweight"].shape == (8, 512)
    assert stored[prefix + "mlp.down_proj.scales"].shape == (2, 128)
    # Word 0 of a row of tiles is lane 0's eight of the first: k 0, 1, 8, 9 of output 0, then of output 8, interleaved.
    words = load_file(folder / "model.safetensors")[prefix + "mlp.gate_proj.qweight"]
    places = [(0, 0), (8, 0), (0, 8), (8, 8), (1, 0), (9, 0), (1, 8), (9, 8)]
    expected = [(int(words[k // 8, n]) >> (4 * (k % 8))) & 15 for k, n in places]
    first = int(stored[prefix + "mlp.gate_up_proj.qweight"][0, 0])
    assert [(first >> (4 * nibble)) & 15 for nibble in range(8)] == expected


def test_a_failed_run_leaves_nothing(model, text, tmp_path, capsys):
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in model.glob("*.json"):
        (broken / path.name).write_bytes(path.read_bytes())
    save_file(weights, broken / "model.safetensors")
    assert main(["quantize", str(broken), str(tmp_path / "out"), "--method", "rtn"]) == 1
    assert "mlp.up_proj" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


@pytest.mark.parametrize(("options", "message"), [
    ((), "--calibration"),
    (("--method", "awq", "--format", "awq"), "--calibration"),
    (("--method", "rtn", "--act-order"), "method gptq"),
    (("--method", "rtn", "--calibration", "TEXT"), "--calibration"),
    (("--method", "ternary", "--calibration", "TEXT"), "--calibration"),
    (("--method", "ternary", "--lm-head", "8"), "--lm-head"), (("--method", "ternary", "--format", "awq"), "--format"),
    (("--method", "ternary", "--act-order"), "--act-order"), (("--method", "ternary", "--asymmetric"), "--asymmetric"),
    (("--method", "ternary", "--no-search"), "--search"), (("--method", "ternary", "--device", "cuda"), "--device"),
    (("--method", "ternary", "--search"), "--search"), (("--method", "ternary", "--skip-positions", "3"), "--skip-pos"),
    (("--act-order", "--format", "awq", "--calibration", "TEXT"), "--static-groups"),
    (("--damping", "0", "--calibration", "TEXT"), "--damping"),
    (("--window", "0", "--calibration", "TEXT"), "--window"),
    (("--calibration", "nowhere.txt"), "does not exist"),
    (("--calibration", "TEXT", "--window", "100000", "--windows", "1"), "--window: expected at most"),
    (("--calibration", "TEXT", "--window", "8", "--skip-positions", "8"), "--skip-positions"),
    (("--calibration", "TEXT", "--window", "8", "--skip-positions", "-1"), "--skip-positions"),
])  # fmt: skip
def test_mistakes_are_explained(model, text, tmp_path, capsys, options, message):
    words = [str(text) if word == "TEXT" else word for word in options]
    assert main(["quantize", str(model), str(tmp_path / "out"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_a_folder_that_exists_is_refused_before_a_model_is_looked_for(tmp_path, capsys, monkeypatch, command):
    """An existing output folder is refused before the model is looked for, which may be a download of many
    gigabytes."""
    monkeypatch.setattr(f"cpmrt.cli.{command}.ModelFolder", None)
    (tmp_path / "link").symlink_to("nothing")
    for out in (tmp_path, tmp_path / "link"):
        assert main([command, "org/name", str(out)]) == 1
        assert "exists already" in capsys.readouterr().err


def test_models_that_cannot_be_quantised(model, text, tmp_path, capsys):
    odd = write_checkpoint(tmp_path / "odd", **SIZES | {"intermediate_size": 96})
    other = write_checkpoint(tmp_path / "other", **SIZES)
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    latents = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    latent = write_checkpoint(
        tmp_path / "latent", **latents, architectures=["MiniCPM3ForCausalLM"], num_key_value_heads=4
    )  # fmt: skip
    done = quantised(model, text, tmp_path / "done", "--method", "rtn")
    for folder, out, message in (
        (latent, "out", "expected grouped attention with RoPE"), (odd, "out", "mlp.down_proj"),
        (other, "out", "MambaForCausalLM"), (done, "out", "quantised already"),
        (tmp_path / "nothing", "out", "expected a folder"), (model, "done", "exists already"),
        (model, "no/where", "not a folder"),
    ):  # fmt: skip
        capsys.readouterr()
        assert main(["quantize", str(folder), str(tmp_path / out), "--method", "rtn"]) == 1
        assert message in capsys.readouterr().err, message
    assert main(["quantize", str(odd), str(tmp_path / "out"), "--method", "rtn", "--group-size", "32"]) == 0


@pytest.mark.parametrize("bits", ["4", "8"])
def test_a_vocabulary_of_no_whole_words_leaves_the_head_in_16_bits(tmp_path, capsys, bits):
    model = write_checkpoint(tmp_path / "odd", **SIZES, vocab_size=261, tie_word_embeddings=False)
    assert main(["quantize", str(model), str(tmp_path / "no"), "--method", "rtn", "--lm-head", bits]) == 1
    error = capsys.readouterr().err
    assert "expected multiples of 8, got lm_head [261, 128]; leave --lm-head out" in error and "--group" not in error
    assert main(["quantize", str(model), str(tmp_path / "out"), "--method", "rtn"]) == 0


def test_outputs_of_a_layer_that_make_no_whole_words_have_another_way(tmp_path, capsys):
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4}
    model = write_checkpoint(tmp_path / "odd", **SIZES | heads)
    command = ["quantize", str(model), str(tmp_path / "no"), "--method", "rtn", "--group-size", "-1"]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "self_attn.o_proj [128, 12]" in error and "cpmrt convert" in error and "--group-size" not in error
    assert main(["convert", str(model), str(tmp_path / "out.gguf"), "--type", "q8_0"]) == 0


def test_what_marlin_cannot_say(model, text, tmp_path, capsys):
    asymmetric = quantised(model, text, tmp_path / "asymmetric", "--method", "rtn", "--asymmetric")
    small = quantised(model, text, tmp_path / "small", "--method", "rtn", "--group-size", "64")
    ordered = quantised(model, text, tmp_path / "ordered", "--act-order")
    for folder, message in ((asymmetric, "sym True"), (small, "128 or -1"), (ordered, "desc_act"), (model, "4 bits")):
        capsys.readouterr()
        assert main(["convert", str(folder), str(tmp_path / "out")]) == 1
        assert message.lower() in capsys.readouterr().err.lower(), message
    good = quantised(model, text, tmp_path / "good", "--act-order", "--static-groups")
    assert main(["convert", "--to", "gptq", str(good), str(tmp_path / "out")]) == 1
    assert main(["convert", str(good), str(tmp_path / "out")]) == 0


def test_calibration_text(tmp_path, model):
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "b.jsonl").write_text('{"text": "bb"}\n{"text": "cc"}\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.py").write_text("d")
    (tmp_path / "e.bin").write_bytes(b"\xff")
    assert sorted(read_texts(tmp_path)) == ["a" * 500, "bb", "cc", "d"]
    assert list(read_texts(tmp_path / "b.jsonl")) == ["bb", "cc"]
    tokenizer = Tokenizer.open(model)
    windows = token_windows(["a" * 500, "b" * 500], tokenizer, 16, 11)
    assert len(windows) == 16 and all(len(window) == 11 and window[0] == 1 for window in windows)
    letters = [tokenizer.decode(window[1:])[0] for window in windows]
    assert letters == ["a", "a", "b", "b"] + ["a"] * 12, "each document's share first, then what is needed"
    assert len(token_windows(["a" * 55], tokenizer, 16, 11)) == 5
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n[]\nrest')
    with pytest.raises(CheckpointError, match="line 2"):
        list(read_texts(tmp_path / "bad.jsonl"))
    (tmp_path / "text.gz").write_bytes(gzip.compress(b"a" * 500))
    with pytest.raises(CheckpointError, match="text.gz is no calibration text: expected UTF-8, got a zero byte"):
        list(read_texts(tmp_path / "text.gz"))
    with pytest.raises(ConfigError, match="too short"):
        token_windows(["ab"], tokenizer, 1, 100)


def test_a_link_is_read_where_it_is_named_itself(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("a")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").symlink_to(tmp_path / "there" / "a.txt")
    assert list(read_texts(tmp_path / "texts" / "b.txt")) == ["a"]
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        list(read_texts(tmp_path / "texts"))


def test_a_line_of_calibration_text_that_is_nested_too_deep_is_named(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"text": "x"}\n' + "[" * 200_000)
    with pytest.raises(CheckpointError, match="line 2"):
        list(read_texts(tmp_path / "deep.jsonl"))


def test_a_file_with_a_tensor_missing_is_not_finished(tmp_path):
    plans = {"a": TensorPlan("F16", (3,)), "b": TensorPlan("I32", (2, 2))}
    with pytest.raises(ValueError, match="never written"), SafetensorsWriter(tmp_path / "x", plans) as writer:
        writer.write("b", np.zeros((2, 2), np.int32))
    with SafetensorsWriter(tmp_path / "y", plans) as writer:
        writer.write("a", np.array([1, 2, 3], np.float16))
        with pytest.raises(ValueError, match="planned"):
            writer.write("b", np.zeros(4, np.int32))
        writer.write("b", np.arange(4, dtype=np.int32).reshape(2, 2)[:, ::-1])
    read = load_file(tmp_path / "y")
    assert read["a"].tolist() == [1, 2, 3] and read["b"].tolist() == [[1, 0], [3, 2]]


@pytest.mark.gpu
def test_on_a_gpu_the_error_is_the_same(model, text, tmp_path, capsys):
    pytest.importorskip("cupy")
    distances = []
    for device in ("cpu", "cuda"):
        folder = quantised(model, text, tmp_path / device, "--device", device, "--act-order", "--group-size", "32")
        distances.append(np.abs(logits(folder) - logits(model)).mean())
    assert distances[1] == pytest.approx(distances[0], rel=0.1)
