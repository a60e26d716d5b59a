"""What drafts for a target model: the method, its layers' sizes and constants, and how its tensors are called.

Read from the draft's config.json and its tensor names, and compared with the target. Sources: EAGLE-2 (arXiv
2406.16858) as the EAGLE repository, vLLM's `minicpm_eagle` and CPM.cu write it; EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, sqrt
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.config.layers import LayerConfig
from cpmrt.config.model import SCALES, ModelConfig
from cpmrt.config.speculation import SpeculationConfig
from cpmrt.errors import CheckpointError, ConfigError, UnsupportedModelError, quoted

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors of a checkpoint, by name."""
_STEMS = ("", "model.")
_LAYERS = {"eagle2": ("eagle_layers.{}", "layers.{}"), "eagle3": ("midlayer", "layers.{}")}
_WEIGHTS = (".weight", ".qweight", ".weight_packed")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
NOT_OF_LAYERS = ("architectures", "model_type", "bos_token_id", "eos_token_id", "sparse_config")
_OF_VLLM = "EagleMiniCPMForCausalLM"
_TAPS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Block:
    """What a DSpark draft (`config.dspark`) has beside its layers.

    A pass has `size` rows: the newest token, and `mask_token_id` in the others. Each drafts the token behind it. The
    Markov head adds to a row's logits the product of two vectors of `markov_rank` elements, one of the token before and
    one of the token itself.
    """

    size: int
    mask_token_id: int
    markov_rank: int
    has_confidence: bool
    """Whether a head says how likely a drafted token is to be accepted."""


@dataclass(frozen=True)
class DraftConfig:
    """A draft that fits its target. `decoder` has the sizes of its layers; None: prompt lookup, which has none.

    For an EAGLE or DSpark draft the decoder's `scale_emb` and `logit_divisor` are those of the target, whose embedding
    and head it uses, and `vocab_size` is the target's; `method` "model" is a whole model of its own.
    """

    method: str
    decoder: ModelConfig | None = None
    stem: str = ""
    """Before the names of `fc` and the norms beside it."""
    layer_name: str = ""
    """Of a layer, with {} for its number."""
    has_input_norms: bool = False
    """RMSNorm of the embedding and of the hidden state before `fc` (MiniCPM's EAGLE-2)."""
    has_fc_bias: bool = False
    has_head: bool = False
    """EAGLE-2 as vLLM has it for MiniCPM: its head counts where that is not a copy of the target's."""
    has_split_fc: bool = False
    """Quantised as two matrices one after the other: the embedding's half [h, h], then the hidden state's (CPM.cu)."""
    taps: tuple[int, ...] = ()
    """The target's layers whose inputs EAGLE-3 and DSpark read. None: the output of the final norm is read."""
    draft_vocab: int = 0
    """Rows of its head; 0: lookup."""
    head_bits: int | None = None
    block: Block | None = None
    """Of a DSpark draft."""

    @property
    def layers_config(self) -> ModelConfig:
        """The draft's layers and constants, for a draft that has layers."""
        assert self.decoder is not None, "prompt lookup has no forward"
        return self.decoder

    @property
    def is_eagle(self) -> bool:
        return self.method in ("eagle2", "eagle3")

    @property
    def reads_states(self) -> bool:
        """Whether it reads the target's hidden states, those of the token before its row's."""
        return self.is_eagle or self.block is not None

    @property
    def hidden_width(self) -> int:
        """Columns of the target's hidden states that a drafted row needs; 0: none."""
        if self.decoder is None or not self.reads_states:
            return 0
        return self.decoder.hidden_size * (len(self.taps) or 1)

    @classmethod
    def lookup(cls) -> DraftConfig:
        """Prompt lookup: it has no files."""
        return cls("lookup")

    @classmethod
    def of_model(cls, decoder: ModelConfig, target: ModelConfig, wish: SpeculationConfig, source: str) -> DraftConfig:
        """An independent model with the target's tokenizer. Raises ConfigError."""
        if decoder.vocab_size != target.vocab_size:
            raise disagrees(source, "vocab_size", target.vocab_size, decoder.vocab_size)
        dense = replace(decoder.attention, sparse=None)
        decoder = replace(decoder, layers=tuple(replace(layer, mixer=dense) for layer in decoder.layers))
        return cls("model", decoder, draft_vocab=decoder.vocab_size, head_bits=wish.head_bits)

    @classmethod
    def of_eagle(
        cls,
        config: Mapping[str, Any],
        shapes: Shapes | None,
        target: ModelConfig,
        wish: SpeculationConfig,
        source: str = "config.json",
        quantize_config: Mapping[str, Any] | None = None,
    ) -> DraftConfig:
        """From config.json's object and the shapes of the tensors (None: there are none, the weights will be random).

        Raises ConfigError where the config contradicts the target, CheckpointError where a tensor does.
        """
        if shapes is not None and (found := detect_method(shapes)) != wish.method:
            raise ConfigError(f"{source}: the draft", expected=wish.method, actual=found, fix=f"use method {found!r}")
        fields = Fields(config, source)
        is_mup = target.logit_divisor != 1.0 or target.scale_emb != 1.0
        decoder = _decoder(fields, target, wish, quantize_config)
        # Classic EAGLE has no norm before its first layer.
        decoder = _wired(decoder, wish.method == "eagle3", wish.method == "eagle3" or is_mup, window=wish.window or 0)
        stem, layer_name = _names(wish.method, shapes, is_mup, source)
        draft = cls(
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


def detect_method(names: Mapping[str, Any]) -> str:
    """The method that a draft's tensors were made for: eagle2 | eagle3 | dspark | model."""
    if "hidden_norm.weight" in names:
        return "dspark"
    if any(name.partition("midlayer.")[1] or name.endswith("hidden_norm.weight") for name in names) or "d2t" in names:
        return "eagle3"
    has_fc = any(f"{stem}fc{end}" in names for stem in _STEMS for end in _WEIGHTS)
    return "eagle2" if has_fc else "model"


def _decoder(
    fields: Fields, target: ModelConfig, wish: SpeculationConfig, quantize_config: Mapping[str, Any] | None
) -> ModelConfig:
    """Sizes and constants of the draft's layers, compared with the target's."""
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
    """A constant that the draft's config repeats must be the target's: it is the target's embedding and head."""
    found = fields.number(name, None)
    if found is not None and not isclose(found, 1.0 if expected is None else expected):
        raise disagrees(fields.source, name, expected, found, f"correct {name} in the draft's config.json")


def _residual_scale(fields: Fields, target: ModelConfig, wish: SpeculationConfig) -> float:
    """Factor on the output of the draft's sublayers. Two runtimes disagree; `wish.residual_scale` says whose counts."""
    depth = fields.number("scale_depth", None, *SCALES)
    kind = f"{fields.data.get('model_type')} {fields.data.get('architectures')}".lower()
    if wish.method == "eagle3" and "minicpm" not in kind:
        return 1.0  # a Llama layer, whatever else its config.json has taken over from the target's
    if wish.residual_scale == "cpmcu":
        if depth is None:
            depth = target.residual_scale * sqrt(target.num_layers)
        return float(depth / sqrt(target.num_layers + 1)) if target.residual_scale != 1.0 else 1.0
    if depth is not None:
        layers = fields.number("mup_denominator", None) or fields.integer("num_hidden_layers", 1)
        return float(depth / sqrt(layers))
    if target.residual_scale != 1.0 and wish.method == "eagle2":
        raise ConfigError(
            f"{fields.source}: scale_depth",
            expected="a value: the target has one",
            actual="nothing",
            fix="add scale_depth and mup_denominator to the draft's config.json, or set residual_scale to 'cpmcu'",
        )
    return 1.0


def _names(method: str, shapes: Shapes | None, is_mup: bool, source: str) -> tuple[str, str]:
    """Stem and layer name of the family that the tensors belong to."""
    patterns = _LAYERS[method]
    if shapes is None:
        return ("model.", "model.eagle_layers.{}") if method == "eagle2" and is_mup else ("", patterns[-1])
    stem = next((stem for stem in _STEMS for end in _WEIGHTS if f"{stem}fc{end}" in shapes), None)
    if stem is None:
        raise CheckpointError(f"{source}: the draft has no tensor fc.weight", expected=f"an {method} draft")
    for pattern in patterns:
        for before in dict.fromkeys((stem, *_STEMS)):
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
    """The layers whose inputs EAGLE-3 reads: an early, a middle and a late one unless the config names them."""
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
    """Rows of the head. A cut of the target's head (EAGLE-2) is known later, with the file that lists its tokens."""
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
    """The parts that only the tensors tell: norms and biases that are there, a split fc."""
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
    """The draft's layers: those of a decoder but for the first, and for these fields of their attention."""

    def wired(number: int, layer: LayerConfig) -> LayerConfig:
        attention = replace(decoder.attention, **mixer)
        return replace(
            layer, mixer=attention, reads_joined=is_eagle3 and number == 0, has_mixer_norm=number > 0 or has_norm
        )

    return replace(decoder, layers=tuple(wired(number, layer) for number, layer in enumerate(decoder.layers)))


def disagrees(source: str, name: str, expected: object, actual: object, fix: str | None = None) -> ConfigError:
    return ConfigError(
        f"{source}: {name} of the draft is not the target's",
        expected=expected,
        actual=actual,
        fix=fix or "use a draft that was made for this model",
    )
