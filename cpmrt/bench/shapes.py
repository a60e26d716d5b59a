"""The config.json of well-known model shapes, and folders that hold them, for runs on random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpmrt.errors import ConfigError

_MINICPM4: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"],
    "vocab_size": 73448,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 73440],
}
_MINICPM5: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 130560,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": [1, 130073],
}
_SALA_ATTENTION = (0, 9, 16, 17, 22, 29, 30, 31)
"""The layers of MiniCPM-SALA with block-sparse attention; the others have lightning attention."""
SHAPES: dict[str, dict[str, Any]] = {
    "minicpm4-8b": _MINICPM4
    | {
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "minicpm4-0.5b": _MINICPM4
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "minicpm-moe-8x2b": _MINICPM4
    | {
        "hidden_size": 2304,
        "intermediate_size": 5760,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 122753,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    "minicpm3-4b": _MINICPM4
    | {
        "architectures": ["MiniCPM3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "minicpm-sala-9b": _MINICPM4
    | {
        "architectures": ["MiniCPMSALAForCausalLM"],
        "max_position_embeddings": 1 << 20,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "mixer_types": ["minicpm4" if layer in _SALA_ATTENTION else "lightning-attn" for layer in range(32)],
        "qk_norm": True,
        "attn_use_rope": False,
        "attn_use_output_gate": True,
        "lightning_nh": 32,
        "lightning_nkv": 32,
        "lightning_head_dim": 128,
        "lightning_scale": "1/sqrt(d)",
        "lightning_use_rope": True,
        "use_output_gate": True,
        "use_output_norm": True,
        "sparse_config": {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192, "use_nope": False},
    },
    "minicpm5-2b": _MINICPM5 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 42},
    "minicpm-s-1b": _MINICPM4
    | {
        "hidden_size": 1536,
        "intermediate_size": 3840,
        "num_hidden_layers": 52,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 73440,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "hidden_act": "fatrelu",
        "hidden_act_param": 0.01,
    },
    "minicpm5-1b": _MINICPM5 | {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24},
}


_OF_A_LAYER = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rms_norm_eps", "torch_dtype",
)  # fmt: skip


_DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5, "rope_theta": 5e6, "block_size": 7,
    "mask_token_id": 0, "markov_rank": 256,
}  # fmt: skip


def draft_configs(name: str) -> dict[str, dict[str, Any]]:
    """Return the config.json of each draft for a shape, by the name of its folder, with layers of the same size.

    EAGLE drafts have one layer, and EAGLE-3's has a head of half the vocabulary, at most 32768 rows. The DSpark draft
    has five layers, which read five of the target's, and blocks of seven, as that of MiniCPM5-2B does.
    """
    target = shape_config(name)
    layer = {"num_key_value_heads": target["num_attention_heads"], "num_hidden_layers": 1}
    layer |= {key: target[key] for key in _OF_A_LAYER if key in target}
    depth = {}
    if "scale_depth" in target:
        depth = {"scale_depth": target["scale_depth"], "mup_denominator": target["num_hidden_layers"]}
    count = target["num_hidden_layers"]
    head = {"draft_vocab_size": min(target["vocab_size"] // 2, 2**15)}
    return {
        "eagle2": {"architectures": ["EagleMiniCPMForCausalLM"], **layer, **depth},
        "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], **layer, **head},
        "dspark": {**layer, **_DSPARK, "target_layer_ids": [round(1 + i * (count - 4) / 4) for i in range(5)]},
    }


def shape_config(name: str) -> dict[str, Any]:
    """Return the config.json of a named shape; the position limit of most is 131072 or more. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError("unknown shape", expected=" | ".join(SHAPES), actual=repr(name))
    return dict(SHAPES[name])


def gptq_config(group_size: int = 128) -> dict[str, Any]:
    """Return the quantization_config of symmetric 4-bit weights; gates of attention stay in 16 bits, as those of
    MiniCPM-SALA do in published checkpoints."""
    rules: dict[str, Any] = {f"-:.*{gate}": {} for gate in ("o_gate", "z_proj")}
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "sym": True, "desc_act": False, "dynamic": rules,
    }  # fmt: skip


def ternary_config(group_size: int = 128) -> dict[str, Any]:
    """Return the quantization_config of ternary weights in 16-bit tensors."""
    return {"quant_method": "ternary", "group_size": group_size}


def blocks_config(name: str) -> dict[str, Any]:
    """Return the quantization_config of random weights in blocks of a type of GGUF."""
    return {"quant_method": "gguf", "type": name}


@contextmanager
def shape_folder(shape: str, draft_changes: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Make a temporary folder with the config.json of a named shape, and those of its drafts in folders within it.

    `draft_changes` are keys for the drafts' configs. Raises ConfigError.
    """
    drafts = {name: config | dict(draft_changes or {}) for name, config in draft_configs(shape).items()}
    with config_folder(shape_config(shape), drafts) as folder:
        yield folder


@contextmanager
def config_folder(config: Mapping[str, Any], drafts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Make a temporary folder with a model's config.json, and one with each draft's in folders of their names."""
    with tempfile.TemporaryDirectory(prefix="cpmrt-shape-") as folder:
        Path(folder, "config.json").write_text(json.dumps(dict(config)))
        for name, draft in drafts.items():
            Path(folder, name).mkdir()
            Path(folder, name, "config.json").write_text(json.dumps(dict(draft)))
        yield folder
