"""The keys of a GGUF file for a model in a folder: what its config.json, tokenizer and chat template say.

They are those that llama.cpp asks for. A tokenizer that its keys cannot describe comes along as a whole as well, in the
key that the format has for that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig, RopeConfig
from cpmrt.config.architectures import ARCHITECTURES
from cpmrt.config.layers import GatedMlp, GroupedAttention, LatentAttention
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.rope import inverse_frequencies
from cpmrt.quantization.gguf_file import KeyValue, Typed
from cpmrt.text import Tokenizer
from cpmrt.text.tokenizer import MAX_TOKENIZER_BYTES
from cpmrt.weights.files import parse_object
from cpmrt.weights.gguf.architectures import GGUF_ARCHITECTURES, LONG_FACTORS, SHORT_FACTORS, GgufArchitecture
from cpmrt.weights.gguf.file import GGUF_SUFFIX
from cpmrt.weights.gguf.header import Value
from cpmrt.weights.gguf.vocabulary import PREFIX, TEMPLATE, TEMPLATES, WHOLE, TokenType, tokenizer_json
from cpmrt.weights.gguf.word_patterns import name_of
from cpmrt.weights.model_files import is_there, read_file, read_json_if_there
from cpmrt.weights.model_folder import ModelFolder

_LOG = logging.getLogger(__name__)
_QUANTIZATION_VERSION = 2


def architecture_row(config: ModelConfig) -> GgufArchitecture:
    """Return the row of GGUF's names for a model. Raises UnsupportedModelError where there is none."""
    for row in GGUF_ARCHITECTURES.values():
        if row.hugging_face == config.architecture:
            return row
    known = ", ".join(row.hugging_face for row in GGUF_ARCHITECTURES.values())
    raise UnsupportedModelError("architecture of a GGUF file", expected=f"one of {known}", actual=config.architecture)


def model_keys(folder: ModelFolder, file_type: int) -> dict[str, KeyValue]:
    """Return the keys of the model itself; `file_type` is llama.cpp's number for what most matrices are stored as.

    Raises UnsupportedModelError for an mlp or a rotary embedding that the keys cannot describe.
    """
    config = folder.config
    row, mixer, mlp = architecture_row(config), config.layers[0].mixer, config.mlp
    if not isinstance(mlp, GatedMlp) or mlp.fatrelu is not None:
        actual = "FATReLU" if isinstance(mlp, GatedMlp) else "a mixture of experts"
        raise UnsupportedModelError(
            "mlp of a GGUF file", expected="gated with SiLU", actual=actual, fix="use the safetensors as they are"
        )
    own: dict[str, KeyValue] = {
        "vocab_size": _u32(config.vocab_size),
        "context_length": _u32(config.max_position_embeddings),
        "embedding_length": _u32(config.hidden_size),
        "block_count": _u32(config.num_layers),
        "feed_forward_length": _u32(mlp.intermediate_size),
        "attention.layer_norm_rms_epsilon": Typed("f32", config.rms_norm_eps),
        "rope.freq_base": Typed("f32", config.rope.theta),
        **_attention_keys(mixer),
        **_rope_keys(config),
    }
    if ARCHITECTURES[config.architecture].mup:  # llama.cpp has those of MiniCPM3 fixed, and does not look
        own |= {
            "embedding_scale": Typed("f32", config.scale_emb),
            "residual_scale": Typed("f32", config.residual_scale),
            "logit_scale": Typed("f32", config.logit_divisor),
        }
    general: dict[str, KeyValue] = {
        "general.architecture": row.name,
        "general.type": "model",
        "general.name": _name(folder) or row.name,
        "general.file_type": _u32(file_type),
        "general.quantization_version": _u32(_QUANTIZATION_VERSION),
    }
    return general | {f"{row.name}.{key}": value for key, value in own.items()}


def _name(folder: ModelFolder) -> str:
    """Return what the model is called: by its repository on a hub, else by its folder or file."""
    if folder.repository is not None:
        return folder.repository.name.rpartition("/")[2]
    return folder.path.name.removesuffix(GGUF_SUFFIX)


def factor_tensors(config: ModelConfig) -> dict[str, Sequence[float]]:
    """Return the factors of a rotary embedding that GGUF keeps as tensors, by their names."""
    if config.rope.kind != "longrope":
        return {}
    return {LONG_FACTORS: config.rope.long_factor, SHORT_FACTORS: config.rope.short_factor}


def _u32(number: int) -> Typed:
    return Typed("u32", number)


def _attention_keys(mixer: object) -> dict[str, KeyValue]:
    if isinstance(mixer, LatentAttention):
        return {
            "attention.head_count": _u32(mixer.num_heads),
            "attention.head_count_kv": _u32(mixer.num_heads),
            "attention.q_lora_rank": _u32(mixer.q_rank),
            "attention.kv_lora_rank": _u32(mixer.kv_rank),
            "attention.key_length": _u32(mixer.query_dim),
            "attention.value_length": _u32(mixer.value_dim),
            "rope.dimension_count": _u32(mixer.rope_dim),
        }
    assert isinstance(mixer, GroupedAttention), type(mixer).__name__
    return {
        "attention.head_count": _u32(mixer.num_heads),
        "attention.head_count_kv": _u32(mixer.num_kv_heads),
        "attention.key_length": _u32(mixer.head_dim),
        "attention.value_length": _u32(mixer.head_dim),
        "rope.dimension_count": _u32(mixer.head_dim),
    }


def _rope_keys(config: ModelConfig) -> dict[str, KeyValue]:
    """Return the keys of the rotary embedding. Raises UnsupportedModelError for what they cannot describe."""
    rope = config.rope
    if (found := _beyond_keys(rope)) is not None:
        raise UnsupportedModelError(
            "rotary embedding of a GGUF file", expected="default, linear, longrope, or yarn by its factor",
            actual=found, fix="use the safetensors as they are",
        )  # fmt: skip
    if rope.kind == "default":
        return {}
    keys: dict[str, KeyValue] = {"rope.scaling.type": rope.kind}
    if rope.kind != "linear":
        keys["rope.scaling.original_context_length"] = _u32(rope.original_max_positions)
    if rope.kind == "longrope":
        return keys | {"rope.scaling.attn_factor": Typed("f32", _attention_factor(config))}
    assert rope.factor is not None, rope
    keys["rope.scaling.factor"] = Typed("f32", rope.factor)
    return keys | (_yarn_keys(config, rope.factor) if rope.kind == "yarn" else {})


def _beyond_keys(rope: RopeConfig) -> str | None:
    """Return what no key says of a rotary embedding, None if they say it all."""
    if rope.kind not in ("default", "linear", "longrope", "yarn"):
        return rope.kind
    if rope.kind == "yarn" and (rope.factor is None or rope.factor <= 1):
        return "yarn without a factor above 1"
    if not rope.truncate:
        return "yarn with truncate: false"
    if rope.list_by == "length" and rope.short_factor != rope.long_factor:
        return 'longrope with list_by: "length"'
    return None


def _yarn_keys(config: ModelConfig, factor: float) -> dict[str, KeyValue]:
    """Return the keys that only YaRN has, and the weight of cos and sin where it is not that of YaRN's own rule.

    The format has it as a multiple of that.
    """
    weight = _attention_factor(config) / (0.1 * log(factor) + 1.0)
    return {
        "rope.scaling.yarn_beta_fast": Typed("f32", config.rope.beta_fast),
        "rope.scaling.yarn_beta_slow": Typed("f32", config.rope.beta_slow),
        **({} if weight == 1.0 else {"rope.scaling.attn_factor": Typed("f32", weight)}),
    }


def _attention_factor(config: ModelConfig) -> float:
    """Return what cos and sin are multiplied by."""
    mixer = config.layers[0].mixer
    rotated = mixer.rope_dim if isinstance(mixer, LatentAttention) else config.attention.head_dim
    return inverse_frequencies(config, rotated, config.max_position_embeddings)[1]


def tokenizer_keys(folder: ModelFolder) -> dict[str, KeyValue]:
    """Return the keys of the folder's tokenizer and chat template. Raises CheckpointError where they are malformed."""
    path = folder.path / "tokenizer.json"
    if not is_there(path):
        return {}
    content = parse_object(read_file(path, MAX_TOKENIZER_BYTES), str(path), unique_keys=True)
    tokenizer = Tokenizer.open(folder.path, vocab_size=folder.config.vocab_size)
    keys = _vocabulary_keys(content, folder.config.vocab_size) | _special_keys(tokenizer, folder)
    if not _says_all(keys, content, folder.path):
        _LOG.warning("%s: no key of GGUF says how this tokenizer splits text: llama.cpp will split it otherwise", path)
        keys[WHOLE] = read_file(path, MAX_TOKENIZER_BYTES).decode()
    return keys | _template_keys(folder.path)


def _vocabulary_keys(content: Mapping[str, Any], rows: int) -> dict[str, KeyValue]:
    """Return tokens, types, and merges or scores; rows without a token are unused ones."""
    model = content["model"]
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    types = dict.fromkeys(texts, TokenType.NORMAL)
    is_pieces = model.get("byte_fallback", False)
    if is_pieces:
        types |= {token_id: TokenType.BYTE for token_id, text in texts.items() if text.startswith("<0x")}
    for token in content.get("added_tokens") or ():
        texts[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == model.get("unk_token"):
            types[token["id"]] = TokenType.UNKNOWN
    count = max(rows, max(texts) + 1)
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(count)]
    keys: dict[str, KeyValue] = {
        "model": "llama" if is_pieces else "gpt2",
        "pre": "default" if is_pieces else name_of(content) or "default",
        "tokens": tokens,
        "token_type": Typed("i32", [types.get(token_id, TokenType.UNUSED) for token_id in range(count)]),
    }
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    if is_pieces:
        keys["scores"] = Typed("f32", _scores(merges, tokens))
        keys["add_space_prefix"] = "Prepend" in str(content.get("normalizer"))
    else:
        keys["merges"] = merges
    return {PREFIX + name: value for name, value in keys.items()}


def _scores(merges: Sequence[str], tokens: Sequence[str]) -> list[float]:
    """Return a score a token, the higher the earlier it is merged; what is never merged comes last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, len(merges))) - 1.0 for token in tokens]


def _special_keys(tokenizer: Tokenizer, folder: ModelFolder) -> dict[str, KeyValue]:
    """Return the ids of special tokens: those that the tokenizer names, else those of config.json."""
    config, special = folder.config, tokenizer.special_ids
    starts = (tokenizer.bos_token_id, config.bos_token_id if config.bos_token_id in special else None)
    bos = next((token_id for token_id in starts if token_id is not None), None)
    ends = tokenizer.eos_token_ids or tuple(token_id for token_id in config.eos_token_ids if token_id in special)
    keys: dict[str, KeyValue] = {"add_bos_token": tokenizer.encode("a")[:1] == [bos] and bos is not None}
    if bos is not None:
        keys["bos_token_id"] = _u32(bos)
    if ends:
        keys["eos_token_id"] = _u32(ends[0])
    others = [token_id for token_id in config.eos_token_ids if token_id in special and token_id not in ends[:1]]
    if others:
        keys["eot_token_id"] = _u32(others[-1])
    unknown = tokenizer.token_id("<unk>")
    if unknown is not None:
        keys["unknown_token_id"] = _u32(unknown)
    return {PREFIX + name: value for name, value in keys.items()}


def _says_all(keys: Mapping[str, KeyValue], content: Mapping[str, Any], path: Path) -> bool:
    """Tell whether the keys alone make the same tokenizer again."""
    made = tokenizer_json({key: _read(value) for key, value in keys.items()}, path)
    model, found = content["model"], made["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    found_pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in found["merges"]]
    cuts_so = content.get("pre_tokenizer") is None if model.get("byte_fallback") else name_of(content) is not None
    is_same = cuts_so and made["normalizer"] == content.get("normalizer")
    return is_same and bool(model.get("ignore_merges")) == found["ignore_merges"] and pairs == found_pairs


def _read(value: KeyValue) -> Value:
    """Return the value of a key as it will be read from the file."""
    if not isinstance(value, Typed):
        return value if isinstance(value, (str, bool)) else list(value)
    return value.value if isinstance(value.value, (int, float)) else np.array(value.value)


def _template_keys(path: Path) -> dict[str, KeyValue]:
    """Return the chat templates of a folder."""
    if is_there(path / "chat_template.jinja"):
        return {TEMPLATE: read_file(path / "chat_template.jinja", MAX_TOKENIZER_BYTES).decode()}
    found = (read_json_if_there(path / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(found, str):
        return {TEMPLATE: found}
    if not isinstance(found, list):
        return {}
    named = {str(entry["name"]): str(entry["template"]) for entry in found}
    keys: dict[str, KeyValue] = {
        TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": text for name, text in named.items()
    }
    return {TEMPLATES: [name for name in named if name != "default"], **keys}
