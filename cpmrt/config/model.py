"""The sizes and constants of one decoder, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeVar

from cpmrt.config.architectures import ARCHITECTURES, MODEL_TYPES, Architecture
from cpmrt.config.fields import Fields
from cpmrt.config.hybrid import read_mixers
from cpmrt.config.layers import ExpertsMlp, GatedMlp, GroupedAttention, LatentAttention, LayerConfig, MixerConfig
from cpmrt.config.quantization import WeightQuantization, read_quantization
from cpmrt.config.rope import RopeConfig
from cpmrt.config.sparse import SparseConfig
from cpmrt.config.text_part import text_part
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

T = TypeVar("T")
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 32, 8
"""The most experts of a layer (on a GPU each is a lane of the warp that chooses), and the most that a token takes."""
SCALES = 1e-3, 1e4
"""The range of the scales of a muP model; outside of it activations vanish or overflow 16 bits."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything the forward pass and the memory plan need to know. Sizes are element counts."""

    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    scale_emb: float
    residual_scale: float
    """The factor of every sublayer's output before it is added to the residual: scale_depth / sqrt(layers)."""
    logit_divisor: float
    """The divisor of the final hidden state before the head: hidden_size / dim_model_base."""
    dtype: DType | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: WeightQuantization | None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> GroupedAttention:
        """The grouped attention that all layers share. Raises UnsupportedModelError where they do not."""
        found: GroupedAttention = self._shared((GroupedAttention,), [layer.mixer for layer in self.layers])
        return found

    @property
    def sparse(self) -> SparseConfig | None:
        """The block-sparse settings of the layers with grouped attention; None where their attention is dense."""
        attention = self.of_kind(GroupedAttention)
        return attention.sparse if attention else None

    @property
    def grouped_attention(self) -> GroupedAttention:
        """The grouped attention of the layers that have any. Raises UnsupportedModelError for none, or for several."""
        found = self.of_kind(GroupedAttention)
        if found is None:
            raise UnsupportedModelError(f"{self.architecture}: no layer has grouped attention")
        return found

    @property
    def mlp(self) -> GatedMlp | ExpertsMlp:
        """The mlp that all layers share. Raises UnsupportedModelError where they do not."""
        found: GatedMlp | ExpertsMlp = self._shared((GatedMlp, ExpertsMlp), [layer.mlp for layer in self.layers])
        return found

    def of_kind(self, kind: type[T]) -> T | None:
        """Return the mixer or mlp of this kind that all layers with one share; None where no layer has one.

        Raises UnsupportedModelError where they differ.
        """
        parts: list[object] = [part for layer in self.layers for part in (layer.mixer, layer.mlp)]
        found = [part for part in parts if isinstance(part, kind)]
        shared: T | None = self._shared((kind,), found) if found else None
        return shared

    def _shared(self, wanted: tuple[type[Any], ...], found: Sequence[object]) -> Any:
        first = found[0]
        if not isinstance(first, wanted) or any(other != first for other in found):
            kinds = ", ".join(dict.fromkeys(type(other).__name__ for other in found)) + ", or of many sizes"
            raise UnsupportedModelError(
                f"{self.architecture}: layers of one kind", expected=wanted[0].__name__, actual=kinds
            )
        return first

    @property
    def max_positions(self) -> int:
        """The number of positions that the rotary embedding was made for: past them the model is out of its range."""
        limit, rope = self.max_position_embeddings, self.rope
        if rope.kind in ("linear", "dynamic"):
            return int(limit * max(rope.factor or 1.0, 1.0))
        if rope.kind == "yarn":
            return max(limit, int(rope.original_max_positions * (rope.factor or 1.0)))
        return limit

    @property
    def default_context(self) -> int:
        """The context where the user asks for none. Dynamic NTK changes every position once it stretches the context,
        so it does that on demand only."""
        return self.max_position_embeddings if self.rope.kind == "dynamic" else self.max_positions

    def chunk_of(self, prefill_chunk: int) -> int:
        """Return the largest chunk size, up to `prefill_chunk`, that every mixer allows (`MixerConfig.prefill_step`).

        Raises ConfigError where `prefill_chunk` is too small for any.
        """
        step = max(layer.mixer.prefill_step for layer in self.layers)
        if prefill_chunk < step:
            what = "prefill_chunk is too small for layers with a recurrent state"
            raise ConfigError(what, expected=f"at least {step}", actual=prefill_chunk)
        return prefill_chunk // step * step

    def for_context(self, limit: int) -> ModelConfig:
        """Return the config of the model for texts of at most `limit` tokens (`MixerConfig.for_context`)."""
        layers = tuple(replace(layer, mixer=layer.mixer.for_context(limit)) for layer in self.layers)
        return self if layers == self.layers else replace(self, layers=layers)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        source: str = "config.json",
        quantize_config: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Return the config in a config.json's object; a generation_config.json's object adds end-of-text ids.

        Of a model that also sees or hears only the language model is read (`text_part`).

        `quantize_config` is the object of a quantize_config.json, which GPTQ tools write. `source` is the path of
        config.json, for messages. Raises ConfigError for a missing or malformed field, UnsupportedModelError for an
        architecture or a feature that is not implemented.
        """
        config = text_part(config, source)
        row = _architecture(config, source)
        fields = Fields(config, source)
        _refuse_unsupported(fields)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        layers, vocab = fields.integer("num_hidden_layers", high=10_000), fields.integer("vocab_size")
        max_positions = fields.integer("max_position_embeddings", row.max_position_embeddings)
        beside = Fields(generation_config or {}, source.replace("config.json", "generation_config.json"))
        eos = {*fields.token_ids("eos_token_id", vocab), *beside.token_ids("eos_token_id", vocab)}
        if not eos and row.eos_token_id is not None:
            eos = {row.eos_token_id}
        bos = fields.token_ids("bos_token_id", vocab)[:1] or (row.bos_token_id,)
        mixer, rotated = (_latent if row.latent_attention else _grouped)(fields, row, hidden, heads)
        mixers = read_mixers(fields, mixer, layers) if row.lists_mixers else (mixer,) * layers
        mlp = _mlp(fields, row)
        return cls(
            architecture=row.name,
            hidden_size=hidden,
            vocab_size=vocab,
            layers=tuple(LayerConfig(mixer, mlp) for mixer in mixers),
            max_position_embeddings=max_positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
            rope=RopeConfig.from_hf(config, source, rotated, max_positions),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", row.tie_word_embeddings),
            dtype=_dtype(fields),
            bos_token_id=bos[0],
            eos_token_ids=tuple(sorted(eos)),
            quantization=read_quantization(config, source, quantize_config),
            **_mup_scales(fields, row, hidden, layers),
        )


def _architecture(config: Mapping[str, Any], source: str) -> Architecture:
    names = config.get("architectures")
    if names is None and isinstance(config.get("model_type"), str):
        names = [MODEL_TYPES.get(config["model_type"], config["model_type"])]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{source}: architectures", expected="a list of one name", actual=quoted(names))
    if names[0] not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{source}: architecture {names[0][:100]} is not supported", expected="one of " + ", ".join(ARCHITECTURES)
        )
    return ARCHITECTURES[names[0]]


def _refuse_unsupported(fields: Fields) -> None:
    if fields.boolean("mlp_bias", False):
        raise UnsupportedModelError(f"{fields.source}: mlp_bias", expected="false", actual="true")
    if fields.boolean("use_sliding_window", False):
        raise UnsupportedModelError(f"{fields.source}: use_sliding_window", expected="false", actual="true")
    layer_types = fields.data.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise fields.fail("layer_types", "a list or null")
    if any(kind != "full_attention" for kind in layer_types or ()):
        raise UnsupportedModelError(f"{fields.source}: layer_types", expected="full_attention only")


def _mlp(fields: Fields, row: Architecture) -> GatedMlp | ExpertsMlp:
    """Return the mlp of every layer: gated or, with `num_experts`, experts, whose number per token has no default."""
    inner, num_experts = fields.integer("intermediate_size"), fields.integer("num_experts", 0, low=0, high=MAX_EXPERTS)
    fatrelu = _fatrelu(fields)
    if not num_experts:
        return GatedMlp(inner, fatrelu)
    if not row.mup:
        what = f"{fields.source}: mixture-of-experts layers (num_experts) of {row.name} are not supported"
        raise UnsupportedModelError(what, expected="those of MiniCPMForCausalLM")
    if fatrelu is not None:
        raise UnsupportedModelError(f"{fields.source}: hidden_act of experts", expected="silu", actual="fatrelu")
    if not fields.boolean("norm_topk_prob", True):
        what = f"{fields.source}: norm_topk_prob"
        raise UnsupportedModelError(what, expected="true: the chosen experts' shares add up to 1", actual="false")
    chosen = fields.integer("num_experts_per_tok", high=MAX_EXPERTS_PER_TOKEN)
    if chosen > num_experts:
        raise fields.fail("num_experts_per_tok", f"at most num_experts ({num_experts})")
    return ExpertsMlp(inner, num_experts, chosen)


def _fatrelu(fields: Fields) -> float | None:
    """Return the threshold of the activation fatrelu, None for silu.

    Raises ConfigError where the threshold is missing (checkpoints differ in it), UnsupportedModelError for any other
    activation.
    """
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish", "fatrelu"):
        raise UnsupportedModelError(
            f"{fields.source}: hidden_act", expected="silu or fatrelu", actual=quoted(activation)
        )
    if activation != "fatrelu":
        return None
    if fields.data.get("hidden_act_param") is None:
        raise ConfigError(
            f"{fields.source}: hidden_act_param is missing", expected="the threshold of the activation fatrelu",
            fix="take it from the model's repository; it is trained with the weights",
        )  # fmt: skip
    threshold: float = fields.number("hidden_act_param", low=0.0, high=1e4)
    return threshold


def _grouped(fields: Fields, row: Architecture, hidden: int, heads: int) -> tuple[MixerConfig, int]:
    """Return grouped attention, and the elements of a head that are rotated."""
    kv_heads, head_dim = _head_geometry(fields, row, hidden, heads)
    bias = fields.boolean("attention_bias", False)
    sparse = SparseConfig.from_hf(fields.data, fields.source)
    qkv_bias, output_bias = bias or row.fixed_qkv_bias, bias and not row.fixed_qkv_bias
    return GroupedAttention(heads, kv_heads, head_dim, qkv_bias, output_bias, row.qk_norm, sparse), head_dim


def _latent(fields: Fields, row: Architecture, hidden: int, heads: int) -> tuple[MixerConfig, int]:
    """Return latent attention, and the elements of a head that are rotated."""
    if fields.boolean("attention_bias", False):
        raise UnsupportedModelError(f"{fields.source}: attention_bias", expected="false", actual="true")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.fail("num_key_value_heads", f"num_attention_heads ({heads}): a latent has no heads to share")
    if "q_lora_rank" in fields.data and fields.data["q_lora_rank"] is None:
        raise UnsupportedModelError(f"{fields.source}: q_lora_rank", expected="a number", actual="null")
    if SparseConfig.from_hf(fields.data, fields.source) is not None:
        raise UnsupportedModelError(f"{fields.source}: sparse_config of a model with latent attention is not supported")
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    q_rank, kv_rank, nope_dim, rope_dim = (fields.integer(name) for name in names)
    if rope_dim % 2:
        raise fields.fail("qk_rope_head_dim", "an even number")
    value_dim = fields.integer("v_head_dim", None)
    if value_dim is None:
        if hidden % heads:
            raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads}), or a v_head_dim")
        value_dim = hidden // heads
    return LatentAttention(heads, q_rank, kv_rank, nope_dim, rope_dim, value_dim), rope_dim


def _head_geometry(fields: Fields, row: Architecture, hidden: int, heads: int) -> tuple[int, int]:
    default_kv = min(row.num_kv_heads, heads) if row.num_kv_heads else heads
    kv_heads = fields.integer("num_key_value_heads", default_kv)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.integer("head_dim", row.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads}), or an explicit head_dim")
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConfigError(f"{fields.source}: head_dim", expected="an even number", actual=head_dim)
    return kv_heads, head_dim


def _mup_scales(fields: Fields, row: Architecture, hidden: int, layers: int) -> dict[str, float]:
    if not row.mup:
        return {"scale_emb": 1.0, "residual_scale": 1.0, "logit_divisor": 1.0}
    return {
        "scale_emb": fields.number("scale_emb", 1.0, *SCALES),
        "residual_scale": fields.number("scale_depth", 1.0, *SCALES) / sqrt(layers),
        "logit_divisor": hidden / fields.number("dim_model_base", 1.0, low=1.0, high=1e6),
    }


def _dtype(fields: Fields) -> DType | None:
    key = fields.first_of("dtype", "torch_dtype")
    name = fields.text(key, None)
    try:
        return DType.parse(name) if name else None
    except ConfigError as error:
        raise fields.fail(key, str(error.expected), "name the type to compute in, or leave it out") from error
