"""The config of a draft for a target model: its method, its layers' sizes and constants, and the names of its tensors.

`config.eagle` and `config.dspark` read it from a draft's config.json and tensor names, and compare it with the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpmrt.config.model import ModelConfig
from cpmrt.config.speculation import SpeculationConfig
from cpmrt.errors import ConfigError, UnsupportedModelError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors of a checkpoint, by name."""
STEMS = ("", "model.")
WEIGHTS = (".weight", ".qweight", ".weight_packed")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
NOT_OF_LAYERS = ("architectures", "model_type", "bos_token_id", "eos_token_id", "sparse_config")


@dataclass(frozen=True)
class Block:
    """The block of a DSpark draft (`config.dspark`), and the heads that it has beside its layers.

    A pass has `size` rows: the newest token, and `mask_token_id` in the others. Each row drafts the token that follows
    it. The Markov head adds to each logit of a row the product of two vectors of `markov_rank` elements, one of the
    token before and one of the logit's own token.
    """

    size: int
    mask_token_id: int
    markov_rank: int
    has_confidence: bool
    """Whether there is a confidence head, which estimates how likely a drafted token is to be accepted."""


@dataclass(frozen=True)
class DraftConfig:
    """A draft that fits its target. `decoder` has the sizes of its layers; None for prompt lookup, which has none.

    For an EAGLE or DSpark draft the decoder's `scale_emb` and `logit_divisor` are those of the target, whose embedding
    and head it uses, and `vocab_size` is the target's; `method` "model" is a whole model of its own.
    """

    method: str
    decoder: ModelConfig | None = None
    stem: str = ""
    """The prefix of the names of `fc` and of the norms beside it."""
    layer_name: str = ""
    """The name of a layer, with {} for its number."""
    has_input_norms: bool = False
    """Whether the embedding and the hidden state are normalised (RMSNorm) before `fc` (MiniCPM's EAGLE-2)."""
    has_fc_bias: bool = False
    has_head: bool = False
    """Whether the draft's files have a head, which counts where it is no copy of the target's: DSpark, and EAGLE-2 as
    vLLM has it for MiniCPM."""
    has_split_fc: bool = False
    """Whether `fc` is quantised as two matrices one after the other: the embedding's half [h, h], then the hidden
    state's (CPM.cu)."""
    taps: tuple[int, ...] = ()
    """The target's layers whose inputs EAGLE-3 and DSpark read; empty: the output of the final norm is read."""
    draft_vocab: int = 0
    """Rows of the draft's head; 0 for prompt lookup."""
    head_bits: int | None = None
    block: Block | None = None
    """The block of a DSpark draft; None for other methods."""

    @property
    def layers_config(self) -> ModelConfig:
        """The `decoder` of a draft that has layers."""
        assert self.decoder is not None, "prompt lookup has no forward"
        return self.decoder

    @property
    def is_eagle(self) -> bool:
        return self.method in ("eagle2", "eagle3")

    @property
    def uses_targets_head(self) -> bool:
        """Whether the draft's head is the target's, or some rows of it, unless its files bring another one
        (`has_head`)."""
        return self.method in ("eagle2", "dspark")

    @property
    def reads_states(self) -> bool:
        """Whether the draft reads the target's hidden states: a row reads those of the token before the row's own."""
        return self.is_eagle or self.block is not None

    @property
    def hidden_width(self) -> int:
        """Columns of the target's hidden states that a drafted row reads; 0 where it reads none."""
        if self.decoder is None or not self.reads_states:
            return 0
        return self.decoder.hidden_size * (len(self.taps) or 1)

    @classmethod
    def lookup(cls) -> DraftConfig:
        """Return the config of prompt lookup, which has no files."""
        return cls("lookup")

    @classmethod
    def of_model(cls, decoder: ModelConfig, target: ModelConfig, wish: SpeculationConfig, source: str) -> DraftConfig:
        """Return the config of a draft that is a whole model with the target's vocabulary.

        Raises ConfigError, UnsupportedModelError.
        """
        if decoder.vocab_size != target.vocab_size:
            raise disagrees(source, "vocab_size", target.vocab_size, decoder.vocab_size)
        try:
            dense = replace(decoder.attention, sparse=None)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"{source}: a draft model must have grouped attention of one size in all layers",
                actual=error.actual,
                fix="use another draft, such as a Llama or a MiniCPM4 with this vocabulary, or 'lookup'",
            ) from None
        decoder = replace(decoder, layers=tuple(replace(layer, mixer=dense) for layer in decoder.layers))
        return cls("model", decoder, draft_vocab=decoder.vocab_size, head_bits=wish.head_bits)


def detect_method(names: Mapping[str, Any]) -> str:
    """Return the method that a draft's tensors were made for: eagle2 | eagle3 | dspark | model."""
    if "hidden_norm.weight" in names:
        return "dspark"
    if any(name.partition("midlayer.")[1] or name.endswith("hidden_norm.weight") for name in names) or "d2t" in names:
        return "eagle3"
    has_fc = any(f"{stem}fc{end}" in names for stem in STEMS for end in WEIGHTS)
    return "eagle2" if has_fc else "model"


def check_method(shapes: Shapes | None, method: str, source: str) -> None:
    """Raise ConfigError if the tensors, where they are known, were made for another method."""
    if shapes is not None and (found := detect_method(shapes)) != method:
        raise ConfigError(f"{source}: the draft", expected=method, actual=found, fix=f"use method {found!r}")


def disagrees(source: str, name: str, expected: object, actual: object, fix: str | None = None) -> ConfigError:
    return ConfigError(
        f"{source}: {name} of the draft is not the target's",
        expected=expected,
        actual=actual,
        fix=fix or "use a draft that was made for this model",
    )
