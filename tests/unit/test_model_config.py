"""ModelConfig.from_hf: all spellings of keys, defaults of model classes, and a clear error for everything else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.config import EngineConfig, ModelConfig, SamplingParams
from cpmrt.config.engine import parse_bytes
from cpmrt.config.layers import ExpertsMlp, LatentAttention
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, CpmrtError, RequestError, UnsupportedModelError
from cpmrt.models.decoder import tensor_specs

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def read(**changes):
    config = {**LLAMA, **changes}
    return ModelConfig.from_hf({key: value for key, value in config.items() if value is not ...})


def test_class_defaults_of_each_architecture():
    llama = read()
    assert (llama.attention.num_kv_heads, llama.attention.head_dim, llama.max_position_embeddings) == (8, 32, 2048)
    assert (llama.tie_word_embeddings, llama.attention.qkv_bias, llama.attention.qk_norm) == (False, False, False)
    assert llama.eos_token_ids == (2,)
    assert (llama.scale_emb, llama.residual_scale, llama.logit_divisor, llama.dtype) == (1, 1, 1, None)
    minicpm = read(architectures=["MiniCPMForCausalLM"])
    assert minicpm.tie_word_embeddings and minicpm.residual_scale == pytest.approx(2**-0.5)
    assert minicpm.logit_divisor == 256
    qwen2 = read(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.attention.qkv_bias, qwen2.attention.output_bias) == (True, False)
    assert qwen2.max_position_embeddings == 32768
    qwen3 = read(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.attention.qk_norm, qwen3.attention.head_dim, qwen3.attention.q_size) == (True, 128, 1024)


def test_minicpm4_8b(shared_data):
    config = ModelConfig.from_hf(json.loads((shared_data / "minicpm4_8b_config.json").read_text()))
    assert config.residual_scale == pytest.approx(0.247487, abs=1e-6)
    assert (config.logit_divisor, config.scale_emb) == (16, 12)
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (2, 128)
    assert config.rope.kind == "longrope" and len(config.rope.long_factor) == 64
    assert config.eos_token_ids == (2, 73440) and config.dtype is DType.BFLOAT16


def test_minicpm3_4b(shared_data):
    raw = json.loads((shared_data / "minicpm3_4b_config.json").read_text())
    config = ModelConfig.from_hf(raw)
    assert config.layers[0].mixer == LatentAttention(40, 768, 256, 64, 32, 64, norm_eps=1e-6)
    assert (config.num_layers, config.logit_divisor, config.tie_word_embeddings) == (62, 10, True)
    assert config.residual_scale == pytest.approx(0.177800, abs=1e-6)
    assert config.rope.kind == "longrope" and len(config.rope.long_factor) == 16 and config.rms_norm_eps == 1e-5
    # 62 layers: attention 13,516,800, mlp 49,152,000, norms 6,144; the embedding, which is the head; the last norm.
    assert sum(spec.num_elements for spec in tensor_specs(config)) == 4_073_875_968 == 62 * 62_674_944 + 73_449 * 2560
    assert ModelConfig.from_hf({**raw, "architectures": None, "model_type": "minicpm3"}) == config


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention_bias": True}, "attention_bias: expected false, got true"),
    ({"q_lora_rank": None}, "q_lora_rank: expected a number, got null"),
    ({"kv_lora_rank": None}, "kv_lora_rank: expected a value"),
    ({"qk_rope_head_dim": 31}, "qk_rope_head_dim: expected an even number"),
    ({"num_key_value_heads": 8}, r"num_key_value_heads: expected num_attention_heads \(40\)"),
    ({"num_attention_heads": 48, "num_key_value_heads": 48}, "or a v_head_dim"),
    ({"sparse_config": {"block_size": 64}}, "sparse_config"),
])  # fmt: skip
def test_latent_attention_that_is_not_implemented_is_refused(shared_data, changes, message):
    raw = json.loads((shared_data / "minicpm3_4b_config.json").read_text()) | changes
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(("changes", "threshold"), [
    ({}, None),
    ({"hidden_act": "silu", "hidden_act_param": 0.01}, None),
    ({"hidden_act": "fatrelu", "hidden_act_param": 0.01}, 0.01),
    ({"hidden_act": "fatrelu", "hidden_act_param": 0}, 0.0),
])  # fmt: skip
def test_the_activation_of_the_gate(changes, threshold):
    assert read(**changes).mlp.fatrelu == threshold


def test_minicpm5_has_an_explicit_head_dim():
    config = read(hidden_size=1536, num_attention_heads=16, num_key_value_heads=2, head_dim=128)
    assert (config.attention.q_size, config.attention.kv_size) == (2048, 256)


LISTS = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
    {"rope_parameters": {"rope_type": "yarn", **YARN}, "rope_theta": 5e5},
])  # fmt: skip
def test_rope_spellings_mean_the_same(spelling):
    rope = read(**spelling).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions) == ("yarn", 5e5, 4.0, 1024)


def test_su_is_longrope_and_null_is_default():
    lists = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = read(rope_scaling={"type": "su", **lists}, original_max_position_embeddings=512).rope
    assert (rope.kind, rope.original_max_positions) == ("longrope", 512)
    assert read(rope_scaling=None).rope.kind == "default"


@pytest.mark.parametrize(("key", "name"), [("dtype", "float16"), ("torch_dtype", "torch.float16")])
def test_dtype_spellings(key, name):
    assert read(**{key: name}).dtype is DType.FLOAT16


def test_the_newer_spelling_of_dtype_counts():
    assert read(torch_dtype="bfloat16", dtype="float16").dtype is DType.FLOAT16


def test_dynamic_scaling_takes_a_head_of_four_columns():
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}, head_dim=4).rope.kind == "dynamic"


def test_end_tokens_of_config_and_generation_config_are_joined():
    config = ModelConfig.from_hf({**LLAMA, "eos_token_id": [2, 7]}, {"eos_token_id": 9})
    assert config.eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(("own", "beside", "expected"), [
    ({}, {}, (2,)), ({"eos_token_id": None}, None, (2,)), ({}, {"eos_token_id": [9, 11]}, (9, 11)),
])  # fmt: skip
def test_the_class_default_ends_a_text_only_where_no_file_names_an_end_token(own, beside, expected):
    silent = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert ModelConfig.from_hf(silent | own, beside).eos_token_ids == expected


def test_position_limits():
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).max_positions == 4096
    dynamic = read(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert (dynamic.max_positions, dynamic.default_context) == (4096, 2048)
    assert read(rope_scaling={"type": "yarn", **YARN}).max_positions == 4096
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read(rope_scaling=llama3).max_positions == 2048


def test_experts():
    moe = {"architectures": ["MiniCPMForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    assert read(**moe).mlp == ExpertsMlp(read().mlp.intermediate_size, 8, 2)
    assert read(**moe | {"num_experts": 0}).mlp == read().mlp
    for changes, error, words in (
        ({"num_experts_per_tok": ...}, ConfigError, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, ConfigError, "num_experts_per_tok"),
        ({"num_experts": 2, "num_experts_per_tok": 3}, ConfigError, "at most num_experts"),
        ({"num_experts": 33}, ConfigError, "num_experts"),
        ({"norm_topk_prob": False}, UnsupportedModelError, "norm_topk_prob"),
        ({"hidden_act": "fatrelu", "hidden_act_param": 0.01}, UnsupportedModelError, "hidden_act"),
    ):
        with pytest.raises(error, match=words):
            read(**moe | changes)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"architectures": ["GPT2LMHeadModel"]}, UnsupportedModelError, "GPT2LMHeadModel"),
    ({"architectures": []}, ConfigError, "architectures"),
    ({"architectures": "LlamaForCausalLM"}, ConfigError, "architectures"),
    ({"architectures": ..., "model_type": "mamba"}, UnsupportedModelError, "mamba"),
    ({"architectures": ..., "model_type": 3}, ConfigError, "architectures"),
    ({"hidden_size": ...}, ConfigError, "hidden_size"),
    ({"hidden_size": None}, ConfigError, "hidden_size"),
    ({"hidden_size": "256"}, ConfigError, "hidden_size"),
    ({"hidden_size": -4}, ConfigError, "hidden_size"),
    ({"hidden_size": True}, ConfigError, "hidden_size"),
    ({"hidden_size": 2.5}, ConfigError, "hidden_size"),
    ({"hidden_size": 10**30}, ConfigError, "hidden_size"),
    ({"hidden_size": 255}, ConfigError, "hidden_size"),
    ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers"),
    ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
    ({"head_dim": 33}, ConfigError, "head_dim"),
    ({"vocab_size": 0}, ConfigError, "vocab_size"),
    ({"rms_norm_eps": 0}, ConfigError, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, ConfigError, "rms_norm_eps"),
    ({"eos_token_id": 5000}, ConfigError, "eos_token_id"),
    ({"eos_token_id": ["x"]}, ConfigError, "eos_token_id"),
    ({"tie_word_embeddings": "yes"}, ConfigError, "tie_word_embeddings"),
    ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
    ({"hidden_act": "fatrelu"}, ConfigError, "hidden_act_param is missing.*the threshold"),
    ({"hidden_act": "fatrelu", "hidden_act_param": "0.01"}, ConfigError, "hidden_act_param"),
    ({"hidden_act": "fatrelu", "hidden_act_param": -0.5}, ConfigError, "hidden_act_param"),
    ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias"),
    ({"num_experts": 8}, UnsupportedModelError, "mixture"),
    ({"use_sliding_window": True}, UnsupportedModelError, "sliding"),
    ({"layer_types": ["sliding_attention"]}, UnsupportedModelError, "layer_types"),
    ({"layer_types": "full_attention"}, ConfigError, "layer_types: expected a list"),
    ({"torch_dtype": "int8"}, ConfigError, r"\.json: torch_dtype: expected float32 \| float16 \| bfloat16, got 'int8'"),
    ({"dtype": "auto"}, ConfigError, r"\.json: dtype: expected float32 \| .*, got 'auto'; name the type"),
    ({"quantization_config": 3}, ConfigError, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary"),
    ({"rope_scaling": [1]}, ConfigError, "rope_scaling"),
    ({"rope_scaling": 0}, ConfigError, "rope_scaling: expected an object or null, got 0"),
    ({"rope_scaling": {"type": "spiral"}}, UnsupportedModelError, "spiral"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, ConfigError, "same kind"),
    ({"rope_scaling": {"type": "linear"}}, ConfigError, "factor"),
    ({"rope_scaling": {"factor": 2.0}}, ConfigError, r"rope_scaling: rope_type: expected default \| .*, got nothing"),
    ({"rope_parameters": {"rope_theta": 5e5, **LISTS}}, ConfigError, "rope_parameters: rope_type: .*, got nothing"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, ConfigError, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, ConfigError, "factor"),
    ({"rope_scaling": {"type": "longrope"}}, ConfigError, "short_factor"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, ConfigError, "short_factor"),
    ({"rope_scaling": {"type": "longrope", "short_factor": ["a"] * 16}}, ConfigError, "short_factor"),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
     ConfigError, "high_freq"),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
     ConfigError, "more than low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, UnsupportedModelError, "layer type"),
    ({"rms_norm_eps": 10**400}, ConfigError, r"rms_norm_eps: expected a number in \[1e-12, 1\]"),
    ({"rope_theta": 10**400}, ConfigError, "rope_theta"),
    ({"rope_theta": 1.0}, ConfigError, r"rope_theta: expected a number in \[1.001"),
    ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, ConfigError, r"factor: expected a number in .1, 1e.06."),
    ({"rope_scaling": {"type": "linear", "factor": 10**5000}}, ConfigError, "got an integer of 16610 bits"),
    ({"rope_scaling": {"type": "yarn", **YARN, "factor": 1e-9}}, ConfigError, "factor"),
    ({"rope_scaling": {"type": "yarn", **YARN, "rope_theta": 1.0}}, ConfigError, "rope_theta"),
    ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1e12}}, ConfigError, "attention_factor.*100"),
    ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1e300}}, ConfigError, "beta_fast"),
    ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, ConfigError,
     "original_max_position_embeddings: expected at most max_position_embeddings"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, ConfigError, "head_dim of at least 4, got 2"),
    ({"rope_scaling": {"type": "longrope", **LISTS, "original_max_position_embeddings": 1}}, ConfigError,
     "original_max_position_embeddings: expected an integer in .2, "),
    ({"rope_scaling": {"type": "longrope", **LISTS, "list_by": "token"}}, ConfigError, "list_by: expected context"),
    ({"rope_scaling": {"type": "longrope", **LISTS}, "max_position_embeddings": 1}, ConfigError, "at least 2"),
    ({"rope_scaling": {"type": "longrope", **LISTS, "long_factor": [1e-308] * 16}}, ConfigError,
     "long_factor: expected numbers in .0.01, 1e.06., got 1e-308"),
    ({"rope_scaling": {"type": "longrope", **LISTS, "long_factor": [float("nan")] * 16}}, ConfigError, "long_factor"),
    ({"architectures": ["MiniCPMForCausalLM"], "scale_emb": 1e-300}, ConfigError, r"scale_emb.*\[0.001, 10000\]"),
    ({"architectures": ["MiniCPMForCausalLM"], "scale_emb": 10**19}, ConfigError, "scale_emb"),
    ({"architectures": ["MiniCPMForCausalLM"], "scale_depth": 10**400}, ConfigError, "scale_depth"),
    ({"architectures": ["MiniCPMForCausalLM"], "dim_model_base": 10**19}, ConfigError, "dim_model_base"),
    ({"hidden_act": "x" * 10**5}, UnsupportedModelError, "hidden_act.{0,200}$"),
])  # fmt: skip
def test_a_bad_field_is_named(changes, error, words):
    with pytest.raises(error, match=words):
        read(**changes)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from([*LLAMA, "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "num_key_value_heads",
                        "eos_token_id", "dtype", "quantization_config", "layer_types", "scale_depth"])  # fmt: skip


@given(st.dictionaries(KEYS, JSON_VALUES, max_size=4), st.sampled_from(["LlamaForCausalLM", "MiniCPMForCausalLM"]))
def test_any_json_is_read_or_refused(changes, architecture):
    try:
        config = ModelConfig.from_hf({**LLAMA, "architectures": [architecture], **changes})
    except CpmrtError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert config.attention.num_heads % config.attention.num_kv_heads == 0 and config.max_positions >= 1


@pytest.mark.parametrize(("text", "size"), [
    ("8GiB", 2**33), ("8 GB", 8 * 10**9), ("512m", 2**29), (4096, 4096), ("1", 1),
])  # fmt: skip
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 parsecs", "0", True, "1e99GiB", "9" * 400])
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError, match="8GiB"):
        parse_bytes(text)


def test_an_integer_that_cannot_be_written_out_is_described():
    with pytest.raises(ConfigError, match="got an integer of 16610 bits"):
        parse_bytes(10**5000)
    with pytest.raises(ConfigError, match="seed.*got an integer of 16610 bits"):
        EngineConfig(seed=10**5000)


@pytest.mark.parametrize("changes", [
    {"executor": "tpu"}, {"dtype": "int4"}, {"max_context": 0}, {"max_context": "4096"}, {"memory_budget": -1},
    {"load_format": "gguf"}, {"prefill_chunk": 0}, {"max_sequences": 65}, {"seed": None}, {"seed": 1.5},
    {"steps_per_launch": 9}, {"kv_dtype": "fp4"}, {"prefix_cache": 1}, {"prefix_dir": ""}, {"cuda_graphs": 1},
    {"prefix_dir": "a", "prefix_cache": False}, {"steps_per_launch": 2, "cuda_graphs": False},
])  # fmt: skip
def test_engine_config_names_the_bad_field(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        EngineConfig(**changes)


def test_what_makes_answers_faster_and_the_same_is_on_by_default():
    engine = EngineConfig()
    assert engine.cuda_graphs and engine.dependent_launch and engine.drafts_adaptively and engine.prefix_cache is True


@pytest.mark.parametrize("changes", [
    {"max_new_tokens": 0}, {"max_new_tokens": 1.5}, {"temperature": -1}, {"temperature": float("nan")},
    {"temperature": "hot"}, {"top_k": -1}, {"top_p": -0.1}, {"top_p": 1.1}, {"min_p": 2.0},
    {"repetition_penalty": 0}, {"presence_penalty": float("inf")}, {"frequency_penalty": None}, {"seed": 2**64},
    {"seed": 1.0}, {"stop": 3}, {"stop": [""]}, {"stop": [b"x"]}, {"stop_token_ids": [-1]}, {"stop_token_ids": ["a"]},
    {"top_k": 10**400}, {"temperature": 10**400}, {"stop_token_ids": [True]}, {"logprobs": 21}, {"logprobs": True},
    {"ignore_eos": 1},
])  # fmt: skip
def test_sampling_params_name_the_bad_field(changes):
    with pytest.raises(RequestError, match=next(iter(changes))):
        SamplingParams(**changes)


def test_sampling_params_take_lists_and_single_strings():
    params = SamplingParams(stop="END", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_logit_bias_is_checked_and_sorted():
    assert SamplingParams(logit_bias={7: 1, 3: -2.5}).logit_bias == ((3, -2.5), (7, 1.0))
    assert SamplingParams(logit_bias=[[7, 1]]).logit_bias == ((7, 1.0),)
    for wrong in ({-1: 1}, {1: 101}, {1: float("nan")}, {"1": 1}, {True: 1}, [(1,)], [5], 5, "12"):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)
