"""Reads DSpark drafts, from their config.json and the names of their tensors, and compares them with the target.

Such a draft computes a block of tokens in one pass of a few layers; they are then chosen one after another with a
Markov head. Source: DeepSpec's DSpark ("Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
Generation"), as `openbmb/MiniCPM5-2B-DSpark` and the drafts for Qwen3 are published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpmrt.config.draft import NOT_OF_LAYERS, ROPE_KEYS, Block, DraftConfig, Shapes, check_method, disagrees
from cpmrt.config.fields import Fields
from cpmrt.config.model import ModelConfig
from cpmrt.config.speculation import DRAFT_METHODS, MAX_NODES, SpeculationConfig, TreeShape
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

_CONFIDENCE = "confidence_head.proj.weight"
_VARIANTS: tuple[tuple[str, Any], ...] = (
    ("markov_head_type", "vanilla"), ("sample_from_anchor", True), ("confidence_head_with_markov", True),
    ("attention_value_scale", 1.0),
)  # fmt: skip
"""Fields that name a variant, with the only value that is implemented, which an absent field has too."""


def read_dspark(
    config: Mapping[str, Any],
    shapes: Shapes | None,
    target: ModelConfig,
    wish: SpeculationConfig,
    source: str = "config.json",
    quantize_config: Mapping[str, Any] | None = None,
) -> DraftConfig:
    """Return the draft that config.json's object and the shapes of its tensors describe.

    `shapes` is None where the weights will be random. Raises ConfigError where the config lacks something or
    contradicts the target, UnsupportedModelError for a variant that is not implemented.
    """
    check_method(shapes, wish.method, source)
    nested = Fields(config, source).mapping("dflash_config")
    fields = Fields({**nested, **config}, source)
    _refuse_variants(fields)
    block = Block(
        fields.integer("block_size", high=MAX_NODES - 1),
        fields.integer("mask_token_id", low=0, high=target.vocab_size - 1),
        fields.integer("markov_rank"),
        _has_confidence(fields, shapes),
    )
    if wish.min_confidence and not block.has_confidence:
        raise ConfigError(
            f"{source}: speculate: min_confidence needs a confidence head", expected=_CONFIDENCE, actual="none",
            fix="leave min_confidence out",
        )  # fmt: skip
    taps = tuple(layer + 1 for layer in _target_layers(fields, target))
    decoder = _decoder(fields, target, quantize_config)
    return DraftConfig(
        wish.method, decoder, layer_name="layers.{}", taps=taps, draft_vocab=target.vocab_size,
        head_bits=wish.head_bits, block=block, has_head=_brings_head(shapes),
    )  # fmt: skip


def chains_of(shapes: tuple[TreeShape, ...], block: Block) -> tuple[TreeShape, ...]:
    """Return the chains that are verified: `shapes` or, if these are the defaults, ones of 1, 1/2 and 1/4 of the block.

    Raises ConfigError for a chain that is longer than the block.
    """
    if tuple(replace(shape, lookup_length=0) for shape in shapes) == DRAFT_METHODS["dspark"].shapes:
        lengths, lookup = dict.fromkeys(-(-block.size // divisor) for divisor in (1, 2, 4)), shapes[0].lookup_length
        return tuple(TreeShape(length, 1, length + 1, lookup) for length in lengths)
    longest = max(shape.num_passes for shape in shapes)
    if longest > block.size:
        raise ConfigError(
            "speculate: num_passes", expected=f"at most {block.size}, the draft's block_size", actual=longest
        )
    return shapes


def _refuse_variants(fields: Fields) -> None:
    """Raise UnsupportedModelError for a field that names a variant that is not implemented."""
    for name, known in _VARIANTS:
        value = fields.data.get(name)
        if value is not None and value != known:
            raise UnsupportedModelError(
                f"{fields.source}: {name} of a DSpark draft", expected=quoted(known), actual=quoted(value)
            )


def _has_confidence(fields: Fields, shapes: Shapes | None) -> bool:
    """Return whether there is a confidence head: by the config or, where it does not say, by the tensors."""
    is_there = shapes is None or _CONFIDENCE in shapes
    return fields.boolean("enable_confidence_head", is_there)


def _brings_head(shapes: Shapes | None) -> bool:
    """Return whether the draft's files have an embedding or a head, which are mostly copies of the target's."""
    return shapes is not None and not shapes.keys().isdisjoint(("embed_tokens.weight", "lm_head.weight"))


def _target_layers(fields: Fields, target: ModelConfig) -> list[int]:
    """Return the target's layers whose outputs the draft reads.

    The last layer may not be among them: in transformers its output includes the final norm.
    """
    named_layers = fields.integer("num_target_layers", target.num_layers)
    if named_layers != target.num_layers:
        raise disagrees(fields.source, "num_target_layers", target.num_layers, named_layers)
    layers, count = fields.data.get("target_layer_ids"), target.num_layers - 1
    if not isinstance(layers, list) or not layers or not all(type(i) is int and 0 <= i < count for i in layers):
        raise fields.fail("target_layer_ids", f"a list of layers in [0, {count})")
    return layers


def _decoder(fields: Fields, target: ModelConfig, quantize_config: Mapping[str, Any] | None) -> ModelConfig:
    """Return the sizes and constants of the draft's layers, which are built like those of Qwen3."""
    source = fields.source
    for name, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (found := fields.integer(name)) != expected:
            raise disagrees(source, name, expected, found)
    if (rows := fields.integer("draft_vocab_size", target.vocab_size)) != target.vocab_size:
        raise UnsupportedModelError(
            f"{source}: draft_vocab_size of a DSpark draft", expected=target.vocab_size, actual=rows
        )
    if not any(fields.data.get(key) for key in ROPE_KEYS):
        raise fields.fail("rope_parameters", "the draft's own rotary embedding: rope_parameters or rope_theta")
    own = {name: value for name, value in fields.data.items() if name not in NOT_OF_LAYERS}
    filled = {"max_position_embeddings": target.max_position_embeddings, **own, "architectures": ["Qwen3ForCausalLM"]}
    decoder = ModelConfig.from_hf(filled, None, source, quantize_config)
    return replace(decoder, scale_emb=target.scale_emb, logit_divisor=target.logit_divisor, dtype=target.dtype)
