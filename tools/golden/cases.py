"""The tiny models of the golden files: each a config.json as a checkpoint would have it, and a context length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference.tiny_models import LLAMA, MINICPM

# Sizes that every executor takes (a GPU: head_dim 64, 96 or 128, all others multiples of 64), and an odd vocabulary.
_SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 99,
}  # fmt: skip
_LLAMA = LLAMA | _SIZES
_MINICPM = MINICPM | _SIZES | {"dim_model_base": 32}

NUM_PROMPT = 70
"""The tokens of a prompt: more than a page of 64 tokens."""
NUM_NEW = 26
CONTEXT = NUM_PROMPT + NUM_NEW

_SHORT_FACTOR = [1.0 + 0.0625 * pair for pair in range(32)]
_LONG_FACTOR = [1.0 + 0.25 * pair for pair in range(32)]
_LISTS = {"short_factor": _SHORT_FACTOR, "long_factor": _LONG_FACTOR}


@dataclass(frozen=True)
class Case:
    """The model of one golden file. `max_context` is the context asked for, None for the model's own."""

    name: str
    config: dict[str, Any]
    max_context: int | None = None


def _changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a config with keys replaced; a value None removes the key."""
    return {key: value for key, value in (base | changes).items() if value is not None}


def _new_spelling(base: dict[str, Any], rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a config in the spelling of transformers 5, with `rope_parameters` and `dtype`."""
    rope = {"rope_theta": 10000.0, "rope_type": "default"} | rope
    return _changed(base, rope_theta=None, torch_dtype=None, dtype="float32", rope_parameters=rope, **changes)


_QWEN2 = _changed(
    _LLAMA, architectures=["Qwen2ForCausalLM"], model_type="qwen2", torch_dtype="bfloat16", rms_norm_eps=1e-6,
    rope_theta=1000000.0, use_sliding_window=False, sliding_window=256, max_window_layers=1, bos_token_id=3,
)  # fmt: skip
_QWEN3 = _new_spelling(
    _LLAMA, {"rope_theta": 1000000.0}, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=128,
    attention_bias=False, layer_types=["full_attention"] * 2,
)  # fmt: skip
_MINIMAL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 99,
}  # fmt: skip

_MINICPM3 = _changed(
    _MINICPM, architectures=["MiniCPM3ForCausalLM"], model_type="minicpm3", num_attention_heads=3,
    num_key_value_heads=3, hidden_size=192, q_lora_rank=128, kv_lora_rank=256, qk_nope_head_dim=64,
    qk_rope_head_dim=32, rope_scaling={
        "type": "longrope", "original_max_position_embeddings": 256,
        "short_factor": _SHORT_FACTOR[:16], "long_factor": _SHORT_FACTOR[:16],
    },
)  # fmt: skip

CASES = (
    Case("llama", _LLAMA),
    Case("llama_class_defaults", _MINIMAL),
    Case("llama_tied", _changed(_LLAMA, tie_word_embeddings=True, num_key_value_heads=2)),
    Case("llama_bias", _changed(_LLAMA, attention_bias=True)),
    Case("llama_head_dim", _new_spelling(_LLAMA, {"rope_theta": 5000000.0}, head_dim=96, eos_token_id=[1, 90])),
    Case("rope_llama3", _changed(_LLAMA, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    })),
    Case("rope_linear", _changed(_LLAMA, rope_scaling={"type": "linear", "factor": 4.0})),
    Case("rope_dynamic_native", _changed(
        _LLAMA, max_position_embeddings=128, rope_scaling={"type": "dynamic", "factor": 2.0},
    )),
    Case("rope_dynamic_stretched", _new_spelling(
        _LLAMA, {"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=48,
    ), max_context=CONTEXT),
    Case("rope_yarn", _changed(_LLAMA, rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    })),
    Case("rope_yarn_mscale", _new_spelling(_LLAMA, {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 0.5,
        "mscale": 1.4, "mscale_all_dim": 0.7, "truncate": False,
    })),
    Case("rope_longrope_short", _changed(_LLAMA, max_position_embeddings=512, rope_scaling={
        "type": "longrope", "original_max_position_embeddings": 128, **_LISTS,
    }), max_context=128),
    Case("rope_longrope_long", _new_spelling(_LLAMA, {
        "rope_type": "longrope", "original_max_position_embeddings": 64, **_LISTS,
    }), max_context=CONTEXT),
    Case("qwen2", _QWEN2),
    Case("qwen2_tied", _changed(_QWEN2, tie_word_embeddings=True)),
    Case("qwen3", _QWEN3),
    Case("minicpm", _MINICPM),
    Case("minicpm_tied", _changed(_MINICPM, tie_word_embeddings=None, torch_dtype="bfloat16", scale_emb=0.75)),
    Case("minicpm_fatrelu", _changed(
        _MINICPM, hidden_act="fatrelu", hidden_act_param=0.05, scale_emb=2,
    )),
    Case("minicpm_longrope", _changed(_MINICPM, rope_scaling={
        "rope_type": "longrope", "original_max_position_embeddings": 256, **_LISTS,
    })),
    Case("minicpm_longrope_extended", _changed(_MINICPM, rope_theta=None, rope_scaling={
        "type": "su", "original_max_position_embeddings": 64, **_LISTS,
    }), max_context=CONTEXT),
    Case("minicpm_moe", _changed(_MINICPM, num_experts=8, num_experts_per_tok=2)),
    Case("minicpm_moe_tied", _changed(
        _MINICPM, tie_word_embeddings=None, scale_emb=0.75, num_experts=5, num_experts_per_tok=3, intermediate_size=64,
    )),
    Case("minicpm3", _MINICPM3),
    Case("minicpm3_tied", _changed(
        _MINICPM3, tie_word_embeddings=None, num_attention_heads=20, num_key_value_heads=20,
        hidden_size=320, v_head_dim=64, torch_dtype="bfloat16", scale_emb=0.75,
    )),
    Case("minicpm3_odd", _changed(
        _MINICPM3, num_attention_heads=5, num_key_value_heads=5, hidden_size=90, intermediate_size=136,
        q_lora_rank=56, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=10, rope_scaling=None,
    )),
)  # fmt: skip
