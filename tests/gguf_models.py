"""Small models as GGUF files, written by the rules of llama.cpp's converter, and the same weights as safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoint import TEMPLATE, write_tokenizer

from cpmrt.config import ModelConfig
from cpmrt.dtypes import F32, DType, from_float32, to_float32
from cpmrt.models.decoder import tensor_specs
from cpmrt.weights.formats.blocks import BLOCK_TYPES, U8, BlockType

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 260, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": [2],
}  # fmt: skip
LISTS = {"long_factor": [1.0 + 0.5 * i for i in range(64)], "short_factor": [1.0 + 0.25 * i for i in range(64)]}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"architectures": ["LlamaForCausalLM"]},
    "minicpm": SIZES | {
        "architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64,
        "tie_word_embeddings": False, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128,
        "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 256, **LISTS},
    },
    "minicpm3": SIZES | {
        "architectures": ["MiniCPM3ForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "rope_scaling": {
            "rope_type": "longrope", "original_max_position_embeddings": 512,
            "long_factor": [1.0 + i for i in range(16)], "short_factor": [1.0 + i for i in range(16)],
        },
    },
    "qwen2": SIZES | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": SIZES | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
}  # fmt: skip
_RENAMED = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
_FLOATS = {"F32": (0, DType.FLOAT32), "F16": (1, DType.FLOAT16), "BF16": (30, DType.BFLOAT16)}
TypeOf = Callable[[str], str]
"""The type of a matrix by its GGUF name."""


def mixed(name: str) -> str:
    """Return the type of a matrix as Q4_K_M mixes them: 6 bits for the head and some of v and down, 4 for the others.

    So q, k and v have different types.
    """
    if name in ("token_embd.weight", "output.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight"):
        return "Q6_K"
    return "Q4_K"


@dataclass(frozen=True)
class Pair:
    """One model twice: as a GGUF file, and as a folder with a config.json and float32 safetensors."""

    gguf: Path
    folder: Path


def write_pair(folder: Path, architecture: str, type_of: TypeOf, seed: int = 0, **config: Any) -> Pair:
    """Write the GGUF file and the folder, with weights drawn from `seed` and rounded to the file's types."""
    settings = CONFIGS[architecture] | config
    random, tensors, weights = np.random.default_rng(seed), list[files.Described](), dict[str, F32]()
    for spec in tensor_specs(ModelConfig.from_hf(settings)):
        for source in spec.sources:
            name, shape = gguf_name(source.name), source.shape
            heads = settings["num_attention_heads" if "q_proj" in source.name else "num_key_value_heads"]
            paired = architecture in ("llama", "minicpm") and re.search("self_attn.[qk]_proj", source.name)
            kind = type_of(name) if len(shape) > 1 else "F32"
            number, data, values = draw(kind, shape, random)
            tensors.append(files.Described(name, shape, number, data))
            weights[source.name] = unpaired(values, heads) if paired else values
    _add_factors(settings, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{architecture}.gguf"
    files.Content(_keys(architecture, settings), tensors).write(path)
    plain = folder / "folder"
    plain.mkdir(exist_ok=True)
    (plain / "config.json").write_text(json.dumps(settings | {"torch_dtype": "float32"}))
    save_file(weights, plain / "model.safetensors")
    write_tokenizer(plain)
    return Pair(path, plain)


def gguf_name(name: str) -> str:
    """Return the name that llama.cpp's converter gives to the checkpoint's tensor `name`."""
    module, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module):
        return f"blk.{match[1]}.{_RENAMED[match[2]]}.{kind}"
    return f"{_RENAMED[module]}.{kind}"


def unpaired(values: F32, heads: int) -> F32:
    """Undo the converter's `permute`: return rows 0, 2, 4, ... of each head, then rows 1, 3, 5, ..."""
    split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(values.shape)


def draw(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> tuple[int, bytes, F32]:
    """Draw a tensor; return the number of its type, its bytes and their values (about 1 / sqrt(K) in matrices)."""
    if kind in _FLOATS:
        number, dtype = _FLOATS[kind]
        values = random.standard_normal(shape).astype(np.float32) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        words = from_float32(np.float32(values + (len(shape) == 1)), dtype)
        return number, words.tobytes(), to_float32(words, dtype)
    row = BLOCK_TYPES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // row.size, row.nbytes), dtype=np.uint8)
    if kind == "TQ2_0":  # no code may be 3
        blocks &= blocks ^ (blocks << 1 & 0xAA) | 0x55
    # Offsets make the mean 0: weights with one sign would give large products, and attention that jumps from key to
    # key with the last bit of its scores.
    factors = np.ones(len(row.halves), np.float32)
    if len(factors) == 2:
        means = [_scaled(row, blocks, one).mean() for one in np.eye(2, dtype=np.float32)]
        factors[1] = -means[0] / means[1]
    _scaled(row, blocks, factors * shape[1] ** -0.5 / _scaled(row, blocks, factors).std())
    rows = blocks.reshape(shape[0], -1)
    return row.number, rows.tobytes(), row.values(rows)


def _scaled(row: BlockType, blocks: U8, factors: F32) -> F32:
    """Write the factors of scales and of offsets into all blocks [N, blocks of a row, bytes]; return the weights."""
    for place, factor in zip(row.halves, factors, strict=True):
        blocks[:, :, place : place + 2] = np.float16([factor]).view(np.uint8)
    return row.values(blocks.reshape(len(blocks), -1))


def _add_factors(settings: dict[str, Any], tensors: list[files.Described]) -> None:
    for kind in ("long", "short"):
        if settings.get("rope_scaling"):
            factors = np.array(settings["rope_scaling"][f"{kind}_factor"], np.float32)
            tensors.append(files.Described(f"rope_factors_{kind}.weight", factors.shape, 0, factors.tobytes()))


def _keys(architecture: str, settings: dict[str, Any]) -> list[tuple[str | bytes, bytes]]:
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    own: dict[str, tuple[int, Any]] = {
        "block_count": (files.U32, layers), "context_length": (files.U32, settings["max_position_embeddings"]),
        "embedding_length": (files.U32, settings["hidden_size"]),
        "feed_forward_length": (files.U32, settings["intermediate_size"]),
        "attention.head_count": (files.U32, heads),
        "attention.head_count_kv": (files.U32, settings["num_key_value_heads"]),
        "attention.layer_norm_rms_epsilon": (files.F32, settings["rms_norm_eps"]),
        "rope.freq_base": (files.F32, settings["rope_theta"]),
        "attention.key_length": (files.U32, settings["head_dim"]),
        "attention.value_length": (files.U32, settings["head_dim"]),
        "rope.dimension_count": (files.U32, settings["head_dim"]),
    }  # fmt: skip
    if "q_lora_rank" in settings:
        nope, rotated = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"]
        own |= {
            "attention.q_lora_rank": (files.U32, settings["q_lora_rank"]),
            "attention.kv_lora_rank": (files.U32, settings["kv_lora_rank"]),
            "attention.key_length": (files.U32, nope + rotated), "rope.dimension_count": (files.U32, rotated),
        }  # fmt: skip
    elif "scale_emb" in settings:
        own |= {
            "embedding_scale": (files.F32, settings["scale_emb"]),
            "residual_scale": (files.F32, settings["scale_depth"] / layers**0.5),
            "logit_scale": (files.F32, settings["hidden_size"] / settings["dim_model_base"]),
        }
    if settings.get("rope_scaling"):
        original = settings["rope_scaling"]["original_max_position_embeddings"]
        own |= {
            "rope.scaling.type": (files.STRING, "longrope"),
            "rope.scaling.original_context_length": (files.U32, original),
        }
    keys: list[tuple[str | bytes, bytes]] = [("general.architecture", files.value(files.STRING, architecture))]
    keys += [(f"{architecture}.{key}", files.value(*content)) for key, content in own.items()]
    return [*keys, *_tokenizer_keys(settings["vocab_size"])]


def _tokenizer_keys(vocab_size: int) -> list[tuple[str | bytes, bytes]]:
    """Return keys of `tiny_checkpoint`'s tokenizer as byte-level BPE without merges, padded with unused tokens."""
    from tokenizers import pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    types = [2, 3, 3, *(1 for _ in tokens[3:])]
    while len(tokens) < vocab_size:
        types.append(5)
        tokens.append(f"[PAD{len(tokens)}]")
    content = {
        "model": (files.STRING, "gpt2"), "pre": (files.STRING, "gpt-2"),
        "tokens": (files.ARRAY, (files.STRING, tokens)),
        "token_type": (files.ARRAY, (files.I32, types)), "merges": (files.ARRAY, (files.STRING, [])),
        "bos_token_id": (files.U32, 1), "eos_token_id": (files.U32, 2), "add_bos_token": (files.BOOL, 1),
    }  # fmt: skip
    keys: list[tuple[str | bytes, bytes]] = [
        (f"tokenizer.ggml.{name}", files.value(*value)) for name, value in content.items()
    ]
    return [*keys, ("tokenizer.chat_template", files.value(files.STRING, TEMPLATE))]
