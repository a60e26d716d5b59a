"""Layers as data: how tokens are mixed, what follows the mixing, and how one layer is wired.

Every kind of mixer and of mlp is one frozen config here and one module in `models/mixers` or `models/mlps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, log2

from cpmrt.config.sparse import SparseConfig

LIGHTNING_BLOCK = 64
"""Tokens of the blocks in which lightning attention computes a prompt; each begins at a multiple of them."""


class MixerConfig:
    """What every kind of token mixing has in common."""

    @property
    def prefill_step(self) -> int:
        """The number of tokens at whose multiples a prompt may be cut into chunks."""
        return 1

    def for_context(self, limit: int) -> MixerConfig:
        """Return the mixer for texts of at most `limit` tokens."""
        return self


class MlpConfig:
    """What every kind of mlp has in common: that it is one."""


@dataclass(frozen=True)
class GroupedAttention(MixerConfig):
    """Grouped-query attention with rotary positions; sizes are element counts.

    `sparse` None: every token looks at all tokens before it. `window`: at most so many last ones; 0: all. Without
    `rope` queries and keys know no position. With an `output_gate` the attention is multiplied by sigmoid(gate(x)).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sparse: SparseConfig | None = None
    window: int = 0
    rope: bool = True
    output_gate: bool = False

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
class LatentAttention(MixerConfig):
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are made of one latent a token.

    Queries come from a latent of `q_rank` elements; keys and values from one of `kv_rank`, which is cached with the
    `rope_dim` elements of a key that carry the position and that all heads share. A query or key head has `nope_dim`
    elements without a position before those, a value head `value_dim`. `norm_eps` is that of the latents' norms.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements that are cached of a token."""
        return self.kv_rank + self.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.query_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim


@dataclass(frozen=True)
class LightningAttention(MixerConfig):
    """Linear attention over a state that decays (lightning attention, arXiv 2405.17381): of each head a matrix [D, D],

        state = exp(-slope) state + k^T v;    o = D^-0.5 q state

    `qk_norm`: RMSNorm of each query and key head, then rotary positions with `rope`. The heads of o together are
    normalised (`output_norm`) and multiplied by sigmoid(gate(x)) (`output_gate`).
    """

    num_heads: int
    head_dim: int
    qk_norm: bool = True
    rope: bool = True
    output_norm: bool = True
    output_gate: bool = True

    @property
    def width(self) -> int:
        """The elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def prefill_step(self) -> int:
        return LIGHTNING_BLOCK

    @property
    def slopes(self) -> tuple[float, ...]:
        """How fast each head forgets: 2^(-8 (h + 1) / H), the slopes of ALiBi (arXiv 2108.12409), in every layer.

        If H is no power of two they are those of the power below it, then every other one of the power above.
        """
        below = 2 ** floor(log2(self.num_heads))
        above = _slopes_of_power(2 * below)[::2]
        return (*_slopes_of_power(below), *above[: self.num_heads - below])


def _slopes_of_power(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * (head + 1) / count) for head in range(count))


@dataclass(frozen=True)
class GatedMlp(MlpConfig):
    """down(silu(gate(x)) * up(x)), with `intermediate_size` columns between.

    With `fatrelu` the gate is kept where it is above this threshold, else 0, in place of SiLU (FATReLU).
    """

    intermediate_size: int
    fatrelu: float | None = None


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
