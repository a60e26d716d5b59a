"""Reads EAGLE drafts, from their config.json and the tensors that they have, and compares them with the target.

Sources: EAGLE-2 (arXiv 2406.16858) as the EAGLE repository, vLLM's `minicpm_eagle` and CPM.cu write it; EAGLE-3 (arXiv
2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose, sqrt
from typing import Any

from cpmrt.config.draft import (
    NOT_OF_LAYERS,
    ROPE_KEYS,
    STEMS,
    WEIGHTS,
    DraftConfig,
    Shapes,
    check_method,
    disagrees,
)
from cpmrt.config.fields import Fields
from cpmrt.config.layers import LayerConfig
from cpmrt.config.model import SCALES, ModelConfig
from cpmrt.config.speculation import SpeculationConfig
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError, quoted

_LAYERS = {"eagle2": ("eagle_layers.{}", "layers.{}"), "eagle3": ("midlayer", "layers.{}")}
_OF_VLLM = "EagleMiniCPMForCausalLM"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_MUP_DENOMINATOR = 32.0
"""The default of `mup_denominator` in MiniCPM's configuration class, whatever the number of layers is."""


def read_eagle(
    config: Mapping[str, Any],
    shapes: Shapes | None,
    target: ModelConfig,
    wish: SpeculationConfig,
    source: str = "config.json",
    quantize_config: Mapping[str, Any] | None = None,
) -> DraftConfig:
    """Return the draft that config.json's object and the shapes of its tensors describe.

    `shapes` is None where the weights will be random. Raises ConfigError where the config contradicts the target,
    CheckpointError where a tensor does.
    """
    check_method(shapes, wish.method, source)
    fields = Fields(config, source)
    is_mup = target.logit_divisor != 1.0 or target.scale_emb != 1.0
    decoder = _decoder(fields, target, wish, quantize_config)
    # Classic EAGLE has no norm before its first layer.
    decoder = _wired(decoder, wish.method == "eagle3", wish.method == "eagle3" or is_mup, window=wish.window or 0)
    stem, layer_name = _names(wish.method, shapes, is_mup, source)
    draft = DraftConfig(
        wish.method,
        decoder,
        stem,
        layer_name,
        has_input_norms=wish.method == "eagle2" and is_mup,
        has_head=_has_head(fields, shapes, target),
        taps=_taps(fields, target) if wish.method == "eagle3" else (),
        draft_vocab=_draft_vocab(fields, shapes, target, wish),
        head_bits=wish.head_bits,
    )
    return draft if shapes is None else _as_stored(draft, shapes, source)


def _decoder(
    fields: Fields, target: ModelConfig, wish: SpeculationConfig, quantize_config: Mapping[str, Any] | None
) -> ModelConfig:
    """Return the sizes and constants of the draft's layers. Raises ConfigError where they contradict the target's."""
    own, source = fields.data, fields.source
    hidden = fields.integer("hidden_size")
    if hidden != target.hidden_size:
        raise disagrees(source, "hidden_size", target.hidden_size, hidden)
    vocab = fields.integer("vocab_size", target.vocab_size)
    # An EAGLE-3 draft may give its own head's rows as vocab_size.
    if vocab != target.vocab_size and not (wish.method == "eagle3" and vocab < target.vocab_size):
        raise disagrees(source, "vocab_size", target.vocab_size, vocab)
    _check_constant(fields, "scale_emb", target.scale_emb)
    if fields.number("dim_model_base", None) is not None and wish.method == "eagle2":
        base = target.hidden_size / target.logit_divisor if target.logit_divisor != 1.0 else None
        _check_constant(fields, "dim_model_base", base)
    filled = {
        "num_hidden_layers": 1, "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps, **own, "vocab_size": target.vocab_size,
    }  # fmt: skip
    filled = {name: value for name, value in filled.items() if name not in NOT_OF_LAYERS}
    decoder = ModelConfig.from_hf({**filled, "architectures": ["LlamaForCausalLM"]}, None, source, quantize_config)
    if wish.method == "eagle3":
        if decoder.num_layers != 1:
            raise ConfigError(f"{source}: num_hidden_layers of an EAGLE-3 draft", expected=1, actual=decoder.num_layers)
        if fields.boolean("norm_before_residual", False):
            raise UnsupportedModelError(f"{source}: norm_before_residual", expected="false", actual="true")
    rope = decoder.rope
    if not any(own.get(key) for key in ROPE_KEYS):
        rope = target.rope
        if rope.kind == "longrope" and decoder.attention.head_dim != 2 * len(rope.long_factor):
            fix = "give the draft a rope_scaling of its own"
            raise disagrees(source, "head_dim", 2 * len(rope.long_factor), decoder.attention.head_dim, fix)
        decoder = replace(decoder, max_position_embeddings=target.max_position_embeddings)
    divisor = target.logit_divisor if wish.method == "eagle2" else 1.0
    scale = _residual_scale(fields, target, wish)
    return replace(
        decoder, rope=rope, scale_emb=target.scale_emb, logit_divisor=divisor, residual_scale=scale, dtype=target.dtype
    )


def _check_constant(fields: Fields, name: str, expected: float | None) -> None:
    """Raise ConfigError where the draft's config repeats a constant of the target's, whose embedding and head it uses,
    with another value."""
    found = fields.number(name, None)
    if found is not None and not isclose(found, 1.0 if expected is None else expected):
        raise disagrees(fields.source, name, expected, found, f"correct {name} in the draft's config.json")


def _residual_scale(fields: Fields, target: ModelConfig, wish: SpeculationConfig) -> float:
    """Return the factor on the output of the draft's sublayers.

    Two runtimes disagree about it; `wish.residual_scale` says whose rule counts.
    """
    depth = fields.number("scale_depth", None, *SCALES)
    kind = f"{fields.data.get('model_type')} {fields.data.get('architectures')}".lower()
    if wish.method == "eagle3" and "minicpm" not in kind:
        return 1.0  # a Llama layer, whatever else its config.json has taken over from the target's
    if wish.residual_scale == "cpmcu":
        if depth is None:
            depth = target.residual_scale * sqrt(target.num_layers)
        return float(depth / sqrt(target.num_layers + 1)) if target.residual_scale != 1.0 else 1.0
    if depth is not None:
        return float(depth / sqrt(fields.number("mup_denominator", _MUP_DENOMINATOR)))
    if target.residual_scale != 1.0 and wish.method == "eagle2":
        raise ConfigError(
            f"{fields.source}: scale_depth",
            expected="a value: the target has one",
            actual="nothing",
            fix="add scale_depth and mup_denominator to the draft's config.json, or set residual_scale to 'cpmcu'",
        )
    return 1.0


def _names(method: str, shapes: Shapes | None, is_mup: bool, source: str) -> tuple[str, str]:
    """Return `DraftConfig.stem` and `layer_name`, by the names of the tensors (`shapes` None: the usual ones)."""
    patterns = _LAYERS[method]
    if shapes is None:
        return ("model.", "model.eagle_layers.{}") if method == "eagle2" and is_mup else ("", patterns[-1])
    stem = next((stem for stem in STEMS for end in WEIGHTS if f"{stem}fc{end}" in shapes), None)
    if stem is None:
        raise CheckpointError(f"{source}: the draft has no tensor fc.weight", expected=f"an {method} draft")
    for pattern in patterns:
        for before in dict.fromkeys((stem, *STEMS)):
            first = before + pattern.format(0) + "."
            if any(name.startswith(first) for name in shapes):
                return stem, before + pattern
    raise CheckpointError(
        f"{source}: the draft has no layers", expected=" or ".join(stem + pattern.format(0) for pattern in patterns)
    )


def _has_head(fields: Fields, shapes: Shapes | None, target: ModelConfig) -> bool:
    named, head = fields.data.get("architectures"), (shapes or {}).get("lm_head.weight")
    return isinstance(named, list) and _OF_VLLM in named and head == (target.vocab_size, target.hidden_size)


def _taps(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 reads: an early, a middle and a late one unless the config names them."""
    layers = target.num_layers
    section = Fields(fields.mapping("eagle_config"), f"{fields.source}: eagle_config")
    place = section if section.data.get(_TAPS) is not None else fields
    named = place.data.get(_TAPS)
    taps = [2, layers // 2, layers - 3] if named is None else named
    if not isinstance(taps, list) or not taps or not all(type(t) is int and 0 <= t < layers for t in taps):
        raise ConfigError(
            f"{place.source}: {_TAPS}",
            expected=f"a list of layers in [0, {layers})",
            actual=quoted(taps),
            fix=f"name the tapped layers in the draft's config.json ({_TAPS})",
        )
    return tuple(taps)


def _draft_vocab(fields: Fields, shapes: Shapes | None, target: ModelConfig, wish: SpeculationConfig) -> int:
    """Return the rows of the draft's head.

    EAGLE-2 has the target's; how it is cut is known later, with the file that lists the frequent tokens.
    """
    if wish.method == "eagle2":
        return target.vocab_size
    named = fields.integer("draft_vocab_size", None)
    offsets = None if shapes is None else shapes.get("d2t")
    rows = named or (offsets[0] if offsets else fields.integer("vocab_size", target.vocab_size))
    if offsets is not None and offsets != (rows,):
        raise ConfigError(f"{fields.source}: draft_vocab_size", expected=f"{list(offsets)}, as d2t", actual=rows)
    if offsets is None and shapes is not None and rows != target.vocab_size:
        raise CheckpointError(f"{fields.source}: the draft has no tensor d2t", expected="d2t, for its cut vocabulary")
    if rows > target.vocab_size:
        raise disagrees(fields.source, "draft_vocab_size", f"at most {target.vocab_size}", rows)
    return int(rows)


def _as_stored(draft: DraftConfig, shapes: Shapes, source: str) -> DraftConfig:
    """Return the draft with the properties that only its tensors tell: which norms and biases it has, a split fc."""
    decoder, stem = draft.decoder, draft.stem
    assert decoder is not None
    norms = [f"{stem}input_norm{i}.weight" in shapes for i in (1, 2)]
    if any(norms) and (not all(norms) or draft.method == "eagle3"):
        raise CheckpointError(f"{source}: the draft's tensors input_norm1 and input_norm2", expected="both, or none")
    first, hidden = draft.layer_name.format(0), decoder.hidden_size
    attention = f"{first}.self_attn"
    has_norm = f"{first}.input_layernorm.weight" in shapes
    is_eagle3, extras = draft.method == "eagle3", {
        "qkv_bias": f"{attention}.q_proj.bias" in shapes,
        "output_bias": f"{attention}.o_proj.bias" in shapes,
        "qk_norm": f"{attention}.q_norm.weight" in shapes,
    }
    return replace(
        draft,
        decoder=_wired(decoder, is_eagle3, has_norm or is_eagle3, **extras),
        has_input_norms=all(norms),
        has_fc_bias=f"{stem}fc.bias" in shapes,
        has_split_fc=draft.method == "eagle2" and shapes.get(f"{stem}fc.qweight") == (hidden // 16, 4 * hidden),
    )


def _wired(decoder: ModelConfig, is_eagle3: bool, has_norm: bool, **mixer: Any) -> ModelConfig:
    """Return the decoder with its layers wired as a draft's, and with the fields `mixer` in their attention.

    Only the first layer is wired differently from that of a model: it may lack the norm before its mixer, and with
    EAGLE-3 it reads the joined buffer (`LayerConfig`).
    """

    def wired(number: int, layer: LayerConfig) -> LayerConfig:
        attention = replace(decoder.attention, **mixer)
        return replace(
            layer, mixer=attention, reads_joined=is_eagle3 and number == 0, has_mixer_norm=number > 0 or has_norm
        )

    return replace(decoder, layers=tuple(wired(number, layer) for number, layer in enumerate(decoder.layers)))
