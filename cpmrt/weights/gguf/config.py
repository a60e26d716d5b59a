"""Makes the config.json and generation_config.json that a GGUF model would have as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.config.architectures import ARCHITECTURES
from cpmrt.config.fields import Fields
from cpmrt.errors import CheckpointError, UnsupportedModelError, quoted
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.gguf.architectures import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    GgufArchitecture,
    architecture_of,
)
from cpmrt.weights.gguf.file import GgufModel
from cpmrt.weights.gguf.header import Value
from cpmrt.weights.gguf.vocabulary import PREFIX, TOKENS, TYPES, TokenType

END_NAMES = ("eos", "eot", "eom")
"""The tokens that end an answer and have a key of their own, by their names in the keys."""
_END_TEXTS = frozenset(("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"))
"""Control tokens that end an answer in every model that has them. A file has keys for only three such tokens, while a
generation_config.json names all.
"""
MAX_FACTORS = 1 << 16
"""The most RoPE factors of a list, which becomes numbers of Python; models have half as many as a head has rows."""
# scale_emb, scale_depth and dim_model_base of MiniCPM3 and of MiniCPM's first files, which lack keys for them.
_OLD_SCALES = (12.0, 1.4, 256)
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Keys `general.sampling.*` of a file -> their names in a generation_config.json."""


def config_json(model: GgufModel) -> dict[str, Any]:
    """Return the object of the config.json that a Hugging Face folder of the model would have.

    Raises ConfigError for a key that is missing or has a wrong value, UnsupportedModelError.
    """
    row = architecture_of(model.metadata, model.path)
    keys, traits = _keys(model, row), ARCHITECTURES[row.hugging_face]
    if keys.integer("expert_count", 0, low=0):
        raise UnsupportedModelError(
            f"{model.path}: key '{row.name}.expert_count'", expected="0: experts are not read from GGUF files",
            actual=keys.data["expert_count"], fix="use the safetensors files of the model",
        )  # fmt: skip
    hidden, layers = keys.integer("embedding_length"), keys.integer("block_count")
    heads = keys.integer("attention.head_count")
    config = {
        "architectures": [row.hugging_face],
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        **(_latent(keys) if traits.latent_attention else _whole_heads(keys)),
        "vocab_size": _vocab_size(model, keys),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6, high=1.0),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(model, keys),
        "tie_word_embeddings": "output.weight" not in model.entries,
        "attention_bias": "blk.0.attn_q.bias" in model.entries,
        "torch_dtype": _dtype(model),
        "bos_token_id": model.metadata.get(f"{PREFIX}bos_token_id"),
        "eos_token_id": end_ids(model.metadata, model.path),
    }
    return config | (_scales(keys, hidden, layers) if traits.mup else {})


def head_dim(model: GgufModel) -> int:
    """Return the number of rows of a query or key head. Raises ConfigError, UnsupportedModelError."""
    return _head_dim(_keys(model, architecture_of(model.metadata, model.path)))


def generation_config_json(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """Return the object of a generation_config.json: the sampling that the file recommends; empty if it has none."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: _decimal(value) for name, value in found.items() if value is not None}


def end_ids(metadata: Mapping[str, Value], path: Path) -> list[int]:
    """Return the ids of the tokens that end an answer, each once. Raises CheckpointError."""
    ids = list[int]()
    for key in (f"{PREFIX}{name}_token_id" for name in END_NAMES):
        value = metadata.get(key)
        if type(value) is int:
            ids.append(value)
        elif value is not None:
            raise CheckpointError(f"{path}: key {quoted(key)}", expected="a token id", actual=quoted(value))
    texts, types = metadata.get(TOKENS), metadata.get(TYPES)
    if isinstance(texts, list) and isinstance(types, np.ndarray) and len(types) == len(texts):
        controls = np.flatnonzero(types == TokenType.CONTROL).tolist()
        ids += [token_id for token_id in controls if texts[token_id] in _END_TEXTS]
    return list(dict.fromkeys(ids))


def _keys(model: GgufModel, row: GgufArchitecture) -> Fields:
    """Return the architecture's keys without its name in front, their floats as short decimals (`_decimal`)."""
    prefix = f"{row.name}."
    own = {key: value for key, value in model.metadata.items() if key.startswith(prefix)}
    values = {key.removeprefix(prefix): _decimal(_same(value)) for key, value in own.items()}
    return Fields(values, f"{model.path}: {prefix[:-1]}")


def _head_dim(keys: Fields) -> int:
    known = keys.integer("attention.key_length", None) or keys.integer("rope.dimension_count", None)
    size: int = known or max(keys.integer("embedding_length") // keys.integer("attention.head_count"), 1)
    return size


def _whole_heads(keys: Fields) -> dict[str, Any]:
    size = _head_dim(keys)
    return {"head_dim": size, "partial_rotary_factor": keys.integer("rope.dimension_count", size) / size}


def _latent(keys: Fields) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention; only a part of each head (`qk_rope_head_dim`) is rotated."""
    rotated, value = keys.integer("rope.dimension_count"), keys.integer("attention.value_length", None)
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.integer("attention.key_length") - rotated,
        **({} if value is None else {"v_head_dim": value}),
    }


def _same(value: Value) -> Value:
    """Return the number that a list has for every layer if it is the same; any other value as it is."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        number: Value = value[0].item()
        return number
    return value


def _decimal(value: Value) -> Value:
    """Return a float32 as the shortest decimal that rounds to it: 1e-06 for 9.999999974752427e-07."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def _vocab_size(model: GgufModel, keys: Fields) -> Any:
    embedding = model.entries.get("token_embd.weight")
    return embedding.shape[0] if embedding else keys.integer("vocab_size")


def _scales(keys: Fields, hidden: int, layers: int) -> dict[str, float]:
    """Return MiniCPM's scales as config.json has them, computed from the factors of the forward pass in the file."""
    embedding, depth, base = _OLD_SCALES
    depth = keys.number("residual_scale", depth / sqrt(layers)) * sqrt(layers)
    return {
        "scale_emb": keys.number("embedding_scale", embedding),
        "scale_depth": float(f"{depth:.6g}"),
        "dim_model_base": float(f"{hidden / keys.number('logit_scale', hidden / base):.6g}"),
    }


def _rope_scaling(model: GgufModel, keys: Fields) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "linear")  # older files lack it and have `rope.scale_linear`
    original = keys.integer("rope.scaling.original_context_length", None)
    weight = keys.number("rope.scaling.attn_factor", None)
    factor = keys.number("rope.scaling.factor", None) or keys.number("rope.scale_linear", None)
    more = {} if original is None else {"original_max_position_embeddings": original}
    if LONG_FACTORS in model.entries or SHORT_FACTORS in model.entries:
        lists = {"long_factor": _factors(model, LONG_FACTORS), "short_factor": _factors(model, SHORT_FACTORS)}
        more |= {} if weight is None else {"attention_factor": weight}
        return {"rope_type": "longrope", **lists, **more}
    if ROPE_FACTORS in model.entries:
        factors = _factors(model, ROPE_FACTORS)  # the factors of Llama 3's rule, as the converter computed them
        return {"rope_type": "longrope", "long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
    if kind == "none" or factor in (None, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{keys.source}: rope.scaling.type", expected="none | linear | yarn, or tensors of factors",
            actual=quoted(kind),
        )  # fmt: skip
    # llama.cpp multiplies YaRN's own attention factor by the key's value; config.json has the product.
    more |= {} if weight is None else {"attention_factor": weight * (0.1 * log(factor) + 1.0)}
    blends = {name: keys.number(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
    return {"rope_type": "yarn", "factor": factor, **more, **blends}


def _factors(model: GgufModel, name: str) -> list[float]:
    """Return the values of a tensor of RoPE factors; for an absent long or short list those of the other one."""
    found = name if name in model.entries else next(other for other in (LONG_FACTORS, SHORT_FACTORS) if other != name)
    entry = model.entries[found]
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_FACTORS:
        raise UnsupportedModelError(
            f"{model.path}: tensor {quoted(found)}", expected=f"F32 of one dimension, at most [{MAX_FACTORS}]",
            actual=f"{entry.dtype} {list(entry.shape)}",
        )  # fmt: skip
    values: list[float] = model.view(found).tolist()
    return values


def _dtype(model: GgufModel) -> str:
    """Return the type of activations: that of the matrices, or bfloat16 if some are in blocks, which do not say it."""
    types = {entry.dtype for entry in model.entries.values() if len(entry.shape) > 1}
    if "BF16" in types or types & BLOCK_TYPES.keys():
        return "bfloat16"
    return "float16" if "F16" in types else "float32"
