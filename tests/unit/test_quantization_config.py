"""Reading quantization_config: as the quantising tools write it, and malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import CONFIG

from cpmrt.config import ModelConfig, WeightQuantization
from cpmrt.config.quantization import read_quantization
from cpmrt.errors import ConfigError, CpmrtError, UnsupportedModelError
from cpmrt.weights.model_folder import ModelFolder

# Settings as written by GPTQModel 5, AutoGPTQ 0.7, AutoAWQ 0.2, AutoRound 0.9, llm-compressor 0.8 and optimum.
GPTQMODEL = {
    "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": {"-:.*lm_head": {}}, "group_size": 128,
    "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.0.0"], "static_groups": False}, "pack_dtype": "int32",
    "quant_method": "gptq", "sym": True,
}  # fmt: skip
AUTOGPTQ = {
    "bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": True, "static_groups": False, "sym": False,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "is_marlin_format": False,
    "quant_method": "gptq",
}  # fmt: skip
OPTIMUM = {
    "bits": 4, "block_name_to_quantize": "model.layers", "checkpoint_format": "gptq_v2", "group_size": 64,
    "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]],
    "quant_method": "gptq", "sym": True, "use_exllama": True,
}  # fmt: skip
AUTOAWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
OLD_AWQ = {"q_group_size": 64, "quant_method": "awq", "version": "GEMM", "w_bit": 4, "zero_point": True}
GPTQMODEL_AWQ = {"bits": 4, "checkpoint_format": "gemm", "group_size": 128, "quant_method": "awq", "sym": False}
AUTO_ROUND = {
    "autoround_version": "0.9.0", "bits": 4, "data_type": "int", "group_size": 128, "packing_format":
    "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True,
    "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"}, "lm_head": {"bits": 4}},
}  # fmt: skip
SCHEME = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
}  # fmt: skip
GROUP = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": SCHEME}
LLM_COMPRESSOR = {
    "config_groups": {"group_0": GROUP | {"format": "pack-quantized"}}, "format": "pack-quantized",
    "global_compression_ratio": None, "ignore": ["lm_head", "model.layers.1.mlp.gate_proj"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.12.2",
}  # fmt: skip


def compressed(**weights: Any) -> dict[str, Any]:
    return LLM_COMPRESSOR | {"config_groups": {"group_0": GROUP | {"weights": SCHEME | weights}}}


def read(section: Any, **others: Any) -> WeightQuantization | None:
    return read_quantization({"quantization_config": section}, "/m/config.json", **others)


@pytest.mark.parametrize(("section", "expected"), [
    (GPTQMODEL, WeightQuantization("gptq", "gptq", 128, True, v1_zeros=True, overrides=True)),
    (AUTOGPTQ, WeightQuantization("gptq", "gptq", 32, False, act_order=True, v1_zeros=True)),
    (OPTIMUM, WeightQuantization("gptq", "gptq", 64, True, only=(
        "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"))),
    (GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": None, "lm_head": True, "dynamic": None},
     WeightQuantization("gptq", "gptq", 128, True, lm_head=True)),
    (GPTQMODEL | {"dynamic": {"+:.*down": {"sym": False}}},
     WeightQuantization("gptq", "gptq", 128, False, v1_zeros=True, overrides=True)),
    (AUTOAWQ, WeightQuantization("awq", "awq", 128, False)),
    (OLD_AWQ, WeightQuantization("awq", "awq", 64, False)),
    (GPTQMODEL_AWQ, WeightQuantization("awq", "awq", 128, False)),
    (GPTQMODEL_AWQ | {"sym": True}, WeightQuantization("awq", "awq", 128, True)),
    (AUTOAWQ | {"modules_to_not_convert": ["mlp.gate"]}, WeightQuantization("awq", "awq", 128, False,
                                                                            skipped=("mlp.gate",))),
    (AUTO_ROUND, WeightQuantization("auto-round", "gptq", 128, True, v1_zeros=True, lm_head=True, overrides=True,
                                    skipped=("model.layers.0.mlp.up_proj",))),
    (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False, "extra_config": None},
     WeightQuantization("auto-round", "awq", 128, False)),
    (AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "extra_config": {}},
     WeightQuantization("auto-round", "gptq", 128, True)),
    ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "sym": False, "data_type": "int",
      "backend": "autoround:exllamav2"}, WeightQuantization("intel/auto-round", "gptq", 128, False)),
    ({"quant_method": "intel/auto-round", "bits": 4, "group_size": 128, "backend": "auto_round:gptq:exllamav2"},
     WeightQuantization("intel/auto-round", "gptq", 128, True, v1_zeros=True)),
    (LLM_COMPRESSOR, WeightQuantization("compressed-tensors", "compressed", 128, True,
                                        skipped=("lm_head", "model.layers.1.mlp.gate_proj"))),
    (compressed(symmetric=False, actorder="group", group_size=32),
     WeightQuantization("compressed-tensors", "compressed", 32, False, act_order=True,
                        skipped=("lm_head", "model.layers.1.mlp.gate_proj"))),
    (compressed(actorder="static", strategy="channel", group_size=None) | {"ignore": ["re:.*gate.*"]},
     WeightQuantization("compressed-tensors", "compressed", -1, True, lm_head=True, overrides=True)),
])  # fmt: skip
def test_settings_as_the_tools_write_them(section: dict[str, Any], expected: WeightQuantization) -> None:
    assert read(section) == expected


def test_compression_config_is_the_same() -> None:
    nested = {"quantization_config": {k: v for k, v in LLM_COMPRESSOR.items() if k != "quant_method"}}
    for section in (LLM_COMPRESSOR, nested):
        assert read_quantization({"compression_config": section}, "config.json") == read(LLM_COMPRESSOR)


def test_what_settings_cover() -> None:
    found = read(AUTO_ROUND)
    assert found is not None and found.covers("lm_head") and found.covers("model.layers.1.mlp.up_proj")
    assert not found.covers("model.layers.0.mlp.up_proj")
    some = read(OPTIMUM)
    assert some is not None and some.covers("model.layers.0.mlp.down_proj")
    assert not some.covers("model.layers.0.self_attn.q_proj") and not some.covers("lm_head")


MALFORMED: list[tuple[Any, str]] = [
    (3, "quantization_config: expected an object"),
    ([GPTQMODEL], "quantization_config: expected an object"),
    (GPTQMODEL | {"bits": 8}, "quantization_config: bits: expected 4, got 8"),
    (GPTQMODEL | {"bits": "4"}, "bits: expected an integer"),
    (GPTQMODEL | {"bits": True}, "bits: expected an integer"),
    (GPTQMODEL | {"bits": None}, "bits: expected a value"),
    (GPTQMODEL | {"group_size": 48}, "group_size: expected -1 | 32 | 64 | 128, got 48"),
    (GPTQMODEL | {"group_size": 0}, "group_size: expected -1"),
    (GPTQMODEL | {"group_size": -2}, "group_size: expected an integer"),
    (GPTQMODEL | {"group_size": 10**30}, "group_size: expected an integer"),
    (GPTQMODEL | {"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq | gptq_v2, got 'marlin'"),
    (GPTQMODEL | {"checkpoint_format": 2}, "checkpoint_format: expected a string"),
    (GPTQMODEL | {"checkpoint_format": None, "format": "bitblas"}, "format: expected gptq | gptq_v2"),
    (GPTQMODEL | {"is_marlin_format": True}, "is_marlin_format: expected false"),
    (GPTQMODEL | {"pack_dtype": "int8"}, "pack_dtype: expected int32"),
    (GPTQMODEL | {"sym": "yes"}, "sym: expected true or false"),
    (GPTQMODEL | {"desc_act": 1}, "desc_act: expected true or false"),
    (GPTQMODEL | {"dynamic": ["-:x"]}, "dynamic: expected an object"),
    (GPTQMODEL | {"modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize: expected a list"),
    (GPTQMODEL | {"modules_in_block_to_quantize": [["q", 3]]}, "modules_in_block_to_quantize: expected a list"),
    (AUTOAWQ | {"version": "gemv_fast"}, "version: expected gemm, got 'gemv_fast'"),
    (AUTOAWQ | {"bits": 3}, "bits: expected 4"),
    (AUTOAWQ | {"group_size": 256}, "group_size: expected -1"),
    (AUTOAWQ | {"modules_to_not_convert": [""]}, "modules_to_not_convert: expected a list of names"),
    (AUTOAWQ | {"zero_point": 0}, "zero_point: expected true or false"),
    (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "packing_format: expected auto_round:auto_gptq"),
    (AUTO_ROUND | {"packing_format": "gguf"}, "packing_format"),
    (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type: expected int"),
    (AUTO_ROUND | {"act_bits": 8}, "act_bits: expected 16"),
    (AUTO_ROUND | {"extra_config": 4}, "extra_config: expected an object"),
    (AUTO_ROUND | {"bits": 2}, "bits: expected 4"),
    (LLM_COMPRESSOR | {"config_groups": {}}, "config_groups: expected an object with at least one group"),
    (LLM_COMPRESSOR | {"config_groups": {"g": 1}}, "config_groups.g: expected an object"),
    (LLM_COMPRESSOR | {"config_groups": {"g": GROUP | {"weights": None}}}, "config_groups.g: weights"),
    (LLM_COMPRESSOR | {"config_groups": {"g": GROUP}, "format": "int-quantized"}, "format: expected pack-quantized"),
    (LLM_COMPRESSOR | {"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8}}}}, "input_activations"),
    (LLM_COMPRESSOR | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: expected nothing"),
    (LLM_COMPRESSOR | {"transform_config": {"config_groups": {}}}, "transform_config: expected nothing"),
    (LLM_COMPRESSOR | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (LLM_COMPRESSOR | {"ignore": "lm_head"}, "ignore: expected a list of names"),
    (compressed(num_bits=8), "weights: num_bits: expected 4, got 8"),
    (compressed(type="float"), "type: expected int"),
    (compressed(strategy="block"), "strategy: expected group | channel"),
    (compressed(strategy="channel"), "group_size: expected nothing, as strategy is channel"),
    (compressed(group_size=100), "group_size: expected -1"),
    (compressed(actorder="random"), "actorder: expected group"),
    (compressed(dynamic=True), "dynamic: expected false"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "words"), MALFORMED)
def test_a_bad_setting_is_an_error_that_names_it(section: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(section)
    message = str(caught.value)
    assert message.startswith("/m/config.json: quantization_config") and words in message and "\n" not in message


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes", "hqq", "x" * 5000])
def test_other_quantisations_are_not_supported(method: str) -> None:
    with pytest.raises(UnsupportedModelError, match="16-bit checkpoint") as caught:
        read({"quant_method": method, "bits": 4, "group_size": 128})
    assert len(str(caught.value)) < 500


def test_quantize_config_beside(tmp_path: Path) -> None:
    """A quantize_config.json without a quant_method, as older GPTQ tools wrote it beside config.json, is read too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    beside = {key: value for key, value in AUTOGPTQ.items() if key != "quant_method"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(beside))
    assert ModelFolder.open(tmp_path).config.quantization == read(AUTOGPTQ)
    (tmp_path / "quantize_config.json").write_text(json.dumps(beside | {"bits": 3}))
    with pytest.raises(ConfigError, match=r"/quantize_config\.json: bits: expected 4, got 3"):
        ModelFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["bits", "group_size", "sym", "desc_act", "checkpoint_format"])
def test_two_files_that_contradict_each_other(name: str) -> None:
    section = GPTQMODEL | {"dynamic": None}
    assert read(section, quantize_config=section) == read(section)
    other = {"bits": 8, "group_size": 32, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"}[name]
    with pytest.raises(ConfigError, match=f"quantize_config.json: {name} contradicts"):
        read(section, quantize_config=section | {name: other})


def test_a_model_in_sixteen_bits() -> None:
    assert read(None) is None and ModelConfig.from_hf(CONFIG).quantization is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SECTIONS = [GPTQMODEL, AUTOAWQ, AUTO_ROUND, LLM_COMPRESSOR]


@given(st.sampled_from(SECTIONS), st.data(), JSON)
def test_no_value_of_a_field_is_more_than_an_error(section: dict[str, Any], data: st.DataObject, value: Any) -> None:
    name = data.draw(st.sampled_from(sorted(section)))
    changed = section | {name: value}
    if section is LLM_COMPRESSOR and data.draw(st.booleans()):
        changed = compressed(**{data.draw(st.sampled_from(sorted(SCHEME))): value})
    try:
        found = read(changed)
    except CpmrtError:
        return
    assert found is not None and found.bits == 4 and found.group_size in (-1, 32, 64, 128)
    assert isinstance(found.covers("model.layers.0.mlp.up_proj"), bool)
