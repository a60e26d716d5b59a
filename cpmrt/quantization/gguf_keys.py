"""Makes the keys of a GGUF file from the config of a model, as llama.cpp reads them."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from cpmrt.config import ModelConfig, RopeConfig, SamplingDefaults
from cpmrt.config.architectures import ARCHITECTURES
from cpmrt.config.layers import GatedMlp, GroupedAttention, LatentAttention
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.rope import inverse_frequencies
from cpmrt.quantization.gguf_file import KeyValue, Typed
from cpmrt.weights.gguf.architectures import GGUF_ARCHITECTURES, LONG_FACTORS, SHORT_FACTORS, GgufArchitecture
from cpmrt.weights.gguf.config import SAMPLING
from cpmrt.weights.gguf.names import without_gguf_suffix
from cpmrt.weights.model_folder import ModelFolder

_QUANTIZATION_VERSION = 2


def architecture_row(config: ModelConfig) -> GgufArchitecture:
    """Return the row of GGUF's names for a model's architecture. Raises UnsupportedModelError where there is none."""
    for row in GGUF_ARCHITECTURES.values():
        if row.hugging_face == config.architecture:
            return row
    known = ", ".join(row.hugging_face for row in GGUF_ARCHITECTURES.values())
    raise UnsupportedModelError("architecture of a GGUF file", expected=f"one of {known}", actual=config.architecture)


def model_keys(folder: ModelFolder, file_type: int) -> dict[str, KeyValue]:
    """Return the keys of the model itself; `file_type` is llama.cpp's number for the type of most matrices.

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
    if ARCHITECTURES[config.architecture].mup:  # llama.cpp ignores them for MiniCPM3: it has fixed values
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
    return general | _sampling_keys(folder.sampling) | {f"{row.name}.{key}": value for key, value in own.items()}


def _name(folder: ModelFolder) -> str:
    """Return the model's name: that of its repository on a hub, else that of its folder or file."""
    if folder.repository is not None:
        return folder.repository.name.rpartition("/")[2]
    return without_gguf_suffix(folder.path.name)


def _sampling_keys(sampling: SamplingDefaults) -> dict[str, KeyValue]:
    """Return the keys of the sampling that the model's makers recommend; none where they recommend nothing."""
    nothing = SamplingDefaults()
    if sampling == nothing:
        return {}
    values = {key: getattr(sampling, name) for key, name in SAMPLING.items()}
    return {
        f"general.sampling.{key}": Typed("i32" if key == "top_k" else "f32", value)
        for key, value in values.items()
        if key == "temp" or value != getattr(nothing, SAMPLING[key])
    }


def factor_tensors(config: ModelConfig) -> dict[str, Sequence[float]]:
    """Return the factors of a rotary embedding that GGUF stores as tensors, by the tensors' names."""
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
    """Return the keys of the rotary embedding. Raises UnsupportedModelError for one that they cannot describe."""
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
    """Return the property of a rotary embedding that the keys cannot describe, or None."""
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
    """Return the keys that only YaRN has, and the key of the factor of cos and sin where that is not YaRN's own.

    YaRN's own is 0.1 ln(factor) + 1; the key holds a multiple of it.
    """
    weight = _attention_factor(config) / (0.1 * log(factor) + 1.0)
    return {
        "rope.scaling.yarn_beta_fast": Typed("f32", config.rope.beta_fast),
        "rope.scaling.yarn_beta_slow": Typed("f32", config.rope.beta_slow),
        **({} if weight == 1.0 else {"rope.scaling.attn_factor": Typed("f32", weight)}),
    }


def _attention_factor(config: ModelConfig) -> float:
    """Return the factor by which cos and sin are multiplied."""
    mixer = config.layers[0].mixer
    rotated = mixer.rope_dim if isinstance(mixer, LatentAttention) else config.attention.head_dim
    return inverse_frequencies(config, rotated, config.max_position_embeddings)[1]
