"""Layers as data: how tokens are mixed, what follows the mixing, and how one layer is wired.

Every kind of mixer and of mlp is one frozen config here and one module in `models/mixers` or `models/mlps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cpmrt.config.sparse import SparseConfig


class MixerConfig:
    """What every kind of token mixing has in common."""

    def for_context(self, limit: int) -> MixerConfig:
        """Return the mixer for texts of at most `limit` tokens."""
        return self


class MlpConfig:
    """What every kind of mlp has in common: that it is one."""


@dataclass(frozen=True)
class GroupedAttention(MixerConfig):
    """Grouped-query attention with rotary positions; sizes are element counts.

    `sparse` None: every token looks at all tokens before it. `window`: at most so many last ones; 0: all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sparse: SparseConfig | None = None
    window: int = 0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def for_context(self, limit: int) -> GroupedAttention:
        """Return it without sparse attention where no token of so short a text would leave any out."""
        if self.sparse is None or self.sparse.leaves_out(limit):
            return self
        return replace(self, sparse=None)


@dataclass(frozen=True)
class GatedMlp(MlpConfig):
    """down(silu(gate(x)) * up(x)), with `intermediate_size` columns between."""

    intermediate_size: int


@dataclass(frozen=True)
class ExpertsMlp(MlpConfig):
    """Gated mlps of which each token takes the `experts_per_token` that its router scores highest.

    The router is a matrix [num_experts, hidden]; the softmax of a token's chosen scores is what their outputs are
    multiplied by. Each expert has `intermediate_size` columns between its products.
    """

    intermediate_size: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True)
class LayerConfig:
    """One layer: x += scale * mixer(norm(x)); x += scale * mlp(norm(x)).

    An EAGLE draft is wired differently: with `reads_joined` the mixer reads the buffer `joined` [T, 2 hidden], which is
    normalised already, in place of norm(x); without `has_mixer_norm` the layer has no norm before its mixer.
    """

    mixer: MixerConfig
    mlp: MlpConfig
    reads_joined: bool = False
    has_mixer_norm: bool = True
