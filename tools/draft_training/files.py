"""Reads and writes a draft's files, without torch: `config.json` and `model.safetensors`, with published names.

EAGLE-2 in the names of vLLM's MiniCPM EAGLE (`model.fc`, `model.input_norm1`, `model.eagle_layers.0`); EAGLE-3 in
those of its authors' checkpoints (`fc`, `midlayer`, `lm_head`, `d2t`: target id = draft id + d2t[draft id]); DSpark in
those of its authors (`fc`, `hidden_norm`, `layers.0`, `markov_head`, `confidence_head`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.dtypes import F32, Array, DType, from_float32, to_float32
from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.quantization.file_writer import SafetensorsWriter, TensorPlan
from cpmrt.weights.model_files import read_json
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.safetensors import SafetensorsFile

METHODS = ("eagle2", "eagle3", "dspark")
# Method -> the layer that reads the features: its prefix in the file, and how many hidden states its q, k, v read.
_LAYER = {"eagle2": ("model.eagle_layers.0", 1), "eagle3": ("midlayer", 2)}
# Keys of config.json that are fields of DraftConfig too.
_SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
)  # fmt: skip
_BLOCK = ("block_size", "mask_token_id", "markov_rank")
# Keys of the target's config.json about rotary positions.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


@dataclass(frozen=True)
class DraftConfig:
    """The sizes of a draft; `vocab_size` is its head's, `taps` the target layers whose inputs EAGLE-3 and DSpark read.

    The last four fields are for DSpark: the number of layers, and the fields of `cpmrt.config.draft.Block`.
    """

    method: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    residual_scale: float
    taps: tuple[int, ...] = ()
    num_layers: int = 1
    block_size: int = 0
    mask_token_id: int = 0
    markov_rank: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError("draft method", expected=" | ".join(METHODS), actual=repr(self.method))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "draft heads", expected=f"a multiple of {self.num_key_value_heads} key-value heads",
                actual=self.num_attention_heads,
            )  # fmt: skip


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose inputs EAGLE-3's authors read: a low, a middle and a high one."""
    return 2, num_layers // 2, num_layers - 3


def default_target_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose outputs published DSpark drafts read, five from the second to the third but last."""
    last = max(num_layers - 3, 0)
    first = min(1, last)
    return tuple(dict.fromkeys(round(first + (last - first) * place / 4) for place in range(5)))


def check_target_layers(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the layers. Raises ConfigError unless there are some, all of the target and before its last one."""
    if not layers or not all(0 <= layer < num_layers - 1 for layer in layers):
        wanted = f"layers in [0, {num_layers - 1})"
        raise ConfigError("target layers", expected=wanted, actual=list(layers), fix="--target-layers 0 1")
    return layers


def check_taps(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """Returns the taps. Raises ConfigError unless they are three layers of the target."""
    if len(taps) != 3 or not all(0 <= layer < num_layers for layer in taps):
        raise ConfigError("taps", expected=f"three layers in [0, {num_layers})", actual=list(taps), fix="--taps 0 1 2")
    return taps


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor in the file, except the token maps."""
    if config.method == "dspark":
        return _dspark_shapes(config)
    hidden = config.hidden_size
    shapes = _layer_shapes(config, *_LAYER[config.method])
    if config.method == "eagle2":
        norms = {f"model.input_norm{which}.weight": (hidden,) for which in (1, 2)}
        return shapes | norms | {"model.fc.weight": (hidden, 2 * hidden)}
    norms = {"midlayer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return shapes | norms | {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (config.vocab_size, hidden)}


def _layer_shapes(config: DraftConfig, layer: str, joined: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * width, config.num_key_value_heads * width
    return {
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q_size, joined * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_size, joined * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_size, joined * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }


def _dspark_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    hidden, rank = config.hidden_size, config.markov_rank
    shapes = {"fc.weight": (hidden, len(config.taps) * hidden), "hidden_norm.weight": (hidden,)}
    for number in range(config.num_layers):
        layer = f"layers.{number}"
        norms = {f"{layer}.self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
        shapes |= _layer_shapes(config, layer, 1) | norms
    heads: dict[str, tuple[int, ...]] = {
        f"markov_head.markov_{part}.weight": (config.vocab_size, rank) for part in ("w1", "w2")
    }
    heads |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    return shapes | heads | {"norm.weight": (hidden,)}


def config_json(config: DraftConfig, target: ModelFolder) -> dict[str, Any]:
    """Returns the contents of `config.json`; rotary keys and scales are the target's."""
    if config.method == "dspark":
        return _dspark_json(config, target)
    raw, is_mup = target.raw_config, _has_scales(target.config)
    family, kind = ("MiniCPM", "minicpm") if is_mup else ("Llama", "llama")
    prefix = {"eagle2": "Eagle", "eagle3": "Eagle3"}[config.method]
    content: dict[str, Any] = {
        "architectures": [f"{prefix}{family}ForCausalLM"],
        "model_type": kind,
        "vocab_size": target.config.vocab_size,
        "num_hidden_layers": 1,
        **{name: getattr(config, name) for name in _SIZES},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    content |= {key: raw[key] for key in _ROPE_KEYS if key in raw}
    if is_mup:
        content |= {key: raw[key] for key in ("scale_emb", "scale_depth", "dim_model_base") if key in raw}
        content["mup_denominator"] = mup_denominator(target)
    if config.method == "eagle3":
        content["draft_vocab_size"] = config.vocab_size
        content["eagle_aux_hidden_state_layer_ids"] = list(config.taps)
    return content


def _dspark_json(config: DraftConfig, target: ModelFolder) -> dict[str, Any]:
    raw = target.raw_config
    content: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        **{name: getattr(config, name) for name in _SIZES},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": target.config.rope.theta,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "num_target_layers": target.config.num_layers,
        **{name: getattr(config, name) for name in _BLOCK},
        "markov_head_type": "vanilla",
        "sample_from_anchor": True,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return content | {key: raw[key] for key in _ROPE_KEYS if key in raw}


def _has_scales(target: ModelConfig) -> bool:
    return (target.scale_emb, target.residual_scale, target.logit_divisor) != (1.0, 1.0, 1.0)


def mup_denominator(target: ModelFolder) -> int:
    """Returns the number of layers by which the draft's residual scale is computed: scale_depth / sqrt(layers)."""
    return int(target.raw_config.get("mup_denominator", target.config.num_layers))


def residual_scale(target: ModelFolder) -> float:
    """Returns the factor of the outputs of the draft's sublayers; 1 for a family without scales."""
    if not _has_scales(target.config):
        return 1.0
    return float(target.raw_config.get("scale_depth", 1.0)) / mup_denominator(target) ** 0.5


def write_draft(
    folder: Path, config: DraftConfig, target: ModelFolder, tensors: Mapping[str, F32], token_ids: Array | None
) -> None:
    """Writes config.json and the weights, rounded to bf16, into `folder`.

    `token_ids` (ascending) are the target ids of the rows of an EAGLE-3 head. Raises ConfigError if the tensors are not
    those of `tensor_shapes`.
    """
    found, expected = {name: tensor.shape for name, tensor in tensors.items()}, tensor_shapes(config)
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
        raise ConfigError(f"{folder}: draft tensors", expected="those of the method", actual=f"wrong: {wrong[:5]}")
    words = {name: ("BF16", from_float32(tensor, DType.BFLOAT16)) for name, tensor in tensors.items()}
    if token_ids is not None:
        words |= _token_maps(token_ids, target.config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    plans = {name: TensorPlan(kind, array.shape) for name, (kind, array) in words.items()}
    with SafetensorsWriter(path, plans) as writer:
        for name, (_, array) in words.items():
            writer.write(name, array)
    text = json.dumps(config_json(config, target), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _token_maps(token_ids: Array, vocab_size: int) -> dict[str, tuple[str, Array]]:
    offsets = token_ids.astype(np.int64) - np.arange(len(token_ids))
    is_drafted = np.zeros(vocab_size, dtype=np.uint8)
    is_drafted[token_ids] = 1
    return {"d2t": ("I64", offsets), "t2d": ("BOOL", is_drafted)}


def read_draft(folder: Path) -> tuple[DraftConfig, dict[str, F32], Array | None]:
    """Reads a draft that `write_draft` wrote: config, weights as float32, and the target ids of an EAGLE-3 head's rows.

    Raises ConfigError or CheckpointError.
    """
    raw = read_json(folder / "config.json")
    config = _read_config(raw, str(folder / "config.json"))
    with SafetensorsFile.open(folder / "model.safetensors") as file:
        tensors = {}
        for name, shape in tensor_shapes(config).items():
            words = file.view(name)
            if words.shape != shape or words.dtype != DType.BFLOAT16.storage:
                raise CheckpointError(f"{file.path}: {name}", expected=f"bf16 {shape}", actual=f"{words.shape}")
            tensors[name] = to_float32(words, DType.BFLOAT16)
        token_ids = None
        if config.method == "eagle3":
            token_ids = file.view("d2t") + np.arange(config.vocab_size)
    return config, tensors, token_ids


def _read_config(raw: Mapping[str, Any], source: str) -> DraftConfig:
    try:
        name = raw["architectures"][0]
        if name == "Qwen3DSparkModel":
            return _read_dspark(raw)
        method = "eagle3" if name.startswith("Eagle3") else "eagle2"
        scale = raw["scale_depth"] / raw["mup_denominator"] ** 0.5 if "scale_depth" in raw else 1.0
        sizes = {name: raw[name] for name in _SIZES}
        vocab = raw["draft_vocab_size" if method == "eagle3" else "vocab_size"]
        taps = tuple(raw.get("eagle_aux_hidden_state_layer_ids", ()))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is not a draft's", expected="what cpmrt train-draft writes") from error
    return DraftConfig(method, vocab_size=vocab, residual_scale=scale, taps=taps, **sizes)


def _read_dspark(raw: Mapping[str, Any]) -> DraftConfig:
    sizes, block = ({name: raw[name] for name in names} for names in (_SIZES, _BLOCK))
    taps = tuple(layer + 1 for layer in raw["target_layer_ids"])
    layers, vocab = raw["num_hidden_layers"], raw["vocab_size"]
    return DraftConfig(
        "dspark", vocab_size=vocab, residual_scale=1.0, taps=taps, num_layers=layers, **sizes, **block
    )  # fmt: skip
