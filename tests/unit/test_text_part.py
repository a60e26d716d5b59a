"""Folders of the MiniCPM family: those that run as they are, those whose language model runs, and those refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import CONFIG, write_checkpoint, write_tokenizer

from cpmrt import LLM, SamplingParams
from cpmrt.config import ModelConfig, WeightQuantization
from cpmrt.errors import ConfigError, UnsupportedModelError
from cpmrt.weights.checkpoint import Checkpoint

PLAIN = {key: value for key, value in CONFIG.items() if key not in ("scale_emb", "scale_depth", "dim_model_base")}
VISION = {"vision_config": {"hidden_size": 32, "model_type": "siglip"}, "slice_config": {"max_slice_nums": 9}}
# The sizes that the repositories' config.json state.
MINICPM_V_4 = VISION | {
    "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 4.0, "hidden_size": 2560, "head_dim": 128,
    "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 2,
    "vocab_size": 73448, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 73440],
    "rope_scaling": {
        "rope_type": "longrope", "factor": 1.0, "original_max_position_embeddings": 32786,
        "long_factor": [1.0] * 64, "short_factor": [1.0] * 64,
    },
}  # fmt: skip
MINICPM_V_4_5 = VISION | {
    "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 4.5, "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 151748, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def logits(folder: Path) -> Any:
    with LLM(folder, executor="reference", max_context=64) as llm:
        return llm.logits([1, 5, 9, 200, 17])


def with_eyes(folder: Path, plain: Path, prefix: str, config: dict[str, Any]) -> Path:
    """Write the weights of a plain model under a prefix, beside tensors of an encoder."""
    folder.mkdir()
    tensors = {prefix + name: tensor for name, tensor in load_file(plain / "model.safetensors").items()}
    encoder = ("vpm.embeddings.patch_embedding.weight", "vpm.post_layernorm.bias", "resampler.query")
    tensors |= {name: np.ones((8, 3), np.float32) for name in encoder}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("is_nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("wrapper", "version", "inner", "prefix"),
    [
        ("MiniCPMV", 4.0, "LlamaForCausalLM", "llm."),
        ("MiniCPMV", "4.5", "Qwen3ForCausalLM", "language_model."),
        ("MiniCPMO", "4.5", "Qwen3ForCausalLM", "llm."),
    ],
)
def test_a_language_model_beside_an_encoder_answers_as_it_does_alone(
    tmp_path: Path, wrapper: str, version: object, inner: str, prefix: str, is_nested: bool
) -> None:
    plain = write_checkpoint(tmp_path / "plain", **PLAIN | {"architectures": [inner], "tie_word_embeddings": False})
    config = json.loads((plain / "config.json").read_text())
    nested = {"text_config": config} if is_nested else {**config, **VISION}
    whole = {**nested, "architectures": [wrapper], "version": version, "torch_dtype": "float32"}
    folder = with_eyes(tmp_path / "whole", plain, prefix, whole)
    with pytest.warns(UserWarning, match=r"3 tensors beside it are left out: resampler\.\*, vpm\.\*") as caught:
        found = logits(folder)
    assert {each.filename for each in caught} == {__file__}
    np.testing.assert_array_equal(found, logits(plain))


@pytest.mark.parametrize("version", ["4.0", "4.5"])
@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
def test_what_says_how_weights_are_quantised_may_stand_beside_a_nested_config(version: str, name: str) -> None:
    def read(**changes: Any) -> WeightQuantization | None:
        whole = {"architectures": ["MiniCPMV"], "version": version, "text_config": PLAIN}
        return ModelConfig.from_hf({**whole, **changes}).quantization

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    other = {**settings, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"group_size": 64}}}}
    found = read(**{name: settings})
    assert found is not None and found.group_size == 32
    assert read(text_config={**PLAIN, "quantization_config": None}, **{name: settings}) == found
    assert read(text_config={**PLAIN, "quantization_config": settings}, **{name: other}) == found
    assert read(llm_config={**PLAIN, name: settings}, text_config=None) == found


def test_names_without_a_prefix_are_left_alone(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpoint.open(plain) as checkpoint:
            assert all(name == entry.name for name, entry in checkpoint.entries.items())


def test_a_model_that_has_its_names_is_taken_whole(tmp_path: Path) -> None:
    """A second model beside it, under a prefix, does not take its place."""
    tensors = {name: np.zeros((2, 2), np.float16) for name in ("model.embed_tokens.weight", "model.norm.weight")}
    save_file(tensors | {f"llm.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.entries) == sorted([*tensors, *(f"llm.{name}" for name in tensors)])


def test_the_language_models_of_v_4_and_v_4_5() -> None:
    four, four_five = ModelConfig.from_hf(MINICPM_V_4), ModelConfig.from_hf(MINICPM_V_4_5)
    assert (four.architecture, four.scale_emb, four.residual_scale) == ("LlamaForCausalLM", 1.0, 1.0)
    assert (four.attention.num_kv_heads, four.rope.kind, four.eos_token_ids) == (2, "longrope", (2, 73440))
    assert (four_five.architecture, four_five.attention.qk_norm) == ("Qwen3ForCausalLM", True)
    assert (four_five.num_layers, four_five.attention.num_kv_heads, four_five.vocab_size) == (36, 8, 151748)


@pytest.mark.parametrize("config", [
    {"architectures": ["MiniCPMV4_6ForConditionalGeneration"], "text_config": {"model_type": "qwen3_5_text"}},
    {"model_type": "minicpmv4_6"},
    {"architectures": ["Qwen3_5ForConditionalGeneration"]},
    {"architectures": ["Qwen3_5MoeForCausalLM"]},
    {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
])  # fmt: skip
def test_a_gated_delta_rule_is_refused_with_what_would_run(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="gated delta rule.*use .*(MiniCPM4|MiniCPM5)") as raised:
        ModelConfig.from_hf(config)
    name = config.get("architectures", ["MiniCPMV4_6ForConditionalGeneration"])[0]
    assert name in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("config", "words"), [
    ({"architectures": ["SiglipVisionModel"]}, "an encoder of images.*use the language model of MiniCPM-V 4.0"),
    ({"architectures": ["MiniCPMV"], "version": 2.6}, "MiniCPMV, version 2.6.*4.0 of MiniCPMV, 4.5 of MiniCPMV"),
    ({"architectures": ["MiniCPMV"]}, "version None, is not supported"),
    ({"architectures": ["MiniCPMV"], "version": "x" * 10**5}, "version .{0,200} is not supported"),
    ({"architectures": ["VoxCPMModel"]}, "speech.*use MiniCPM4"),
    ({"architectures": ["NobodyForCausalLM"]}, "NobodyForCausalLM is not supported: expected one of Llama"),
])  # fmt: skip
def test_others_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        ModelConfig.from_hf(config)


def test_a_nested_config_is_an_object() -> None:
    with pytest.raises(ConfigError, match="text_config"):
        ModelConfig.from_hf({"architectures": ["MiniCPMV"], "version": 4.5, "text_config": [1]})


# Only the long-context one of the first models has an untied head and a RoPE base raised at run time.
MINICPM_2B_128K = {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760,
    "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36, "vocab_size": 127660,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "dynamic", "factor": 4.0},
}  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_minicpm_2b_128k_is_a_minicpm_with_its_own_head(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(MINICPM_2B_128K)
    assert not config.tie_word_embeddings and config.max_positions == 4 * 65536 and config.attention.num_kv_heads == 36
    small = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "tie_word_embeddings": False, "num_key_value_heads": 4}
    folder = write_checkpoint(tmp_path / "model", **small)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHATML}))
    with LLM(folder, executor="reference", max_context=4096) as llm:
        answer = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert len(answer.token_ids) == 4
        prompt = "".join(f"<|im_start|>{part}" for part in ("user\nHi<|im_end|>\n", "assistant\n"))
        assert llm.generate(prompt, SamplingParams(max_new_tokens=4, ignore_eos=True)).token_ids == answer.token_ids


@pytest.mark.parametrize("name", ["MiniCPM4-MCP", "MiniCPM4-Survey"])
def test_models_trained_further_from_minicpm4_are_minicpm4(shared_data: Path, name: str) -> None:
    base = json.loads((shared_data / "minicpm4_8b_config.json").read_text())
    trained = {**base, "_name_or_path": f"openbmb/{name}", "use_cache": False, "transformers_version": "4.46.3"}
    assert ModelConfig.from_hf(trained) == ModelConfig.from_hf(base)
