"""Layers as data: the mixer and the mlp of a layer, and how they are wired.

Every kind of mixer and of mlp is one frozen config here and one module in `models/mixers` or `models/mlps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor, log2

from cpmrt.config.sparse import SparseConfig

LIGHTNING_BLOCK = 64
"""Tokens of each block in which lightning attention computes a prompt; a block begins at a multiple of it."""


class MixerConfig:
    """The base of every kind of mixer."""

    @property
    def prefill_step(self) -> int:
        """Every chunk of a prompt but the last must have a multiple of this number of tokens."""
        return 1

    def for_context(self, limit: int) -> MixerConfig:
        """Return an equivalent mixer, perhaps a simpler one, for texts of at most `limit` tokens."""
        return self


class MlpConfig:
    """The base of every kind of mlp, which have nothing else in common."""


@dataclass(frozen=True)
class GroupedAttention(MixerConfig):
    """Grouped-query attention with rotary positions; sizes are element counts.

    With `sparse` None every token looks at all tokens before it, or with a `window` above 0 at no more than so many
    last ones. Without `rope` queries and keys carry no position. With an `output_gate` the attention's output is
    multiplied by sigmoid(gate(x)).
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
        """Return the mixer without `sparse` where no token of a text of `limit` tokens would leave out a block."""
        if self.sparse is None or self.sparse.leaves_out(limit):
            return self
        return replace(self, sparse=None)


@dataclass(frozen=True)
class LatentAttention(MixerConfig):
    """Multi-head latent attention (arXiv 2405.04434): the keys and values of all heads are made of one latent a token.

    Queries come from a latent of `q_rank` elements, keys and values from one of `kv_rank` elements. The latter is
    cached, together with the `rope_dim` elements of a key that carry the position, which all heads share. A query or
    key head has `nope_dim` elements without a position before those, a value head has `value_dim`. `norm_eps` is that
    of the latents' norms.
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
        """Elements that are cached for each token."""
        return self.kv_rank + self.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.query_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim


@dataclass(frozen=True)
class LightningAttention(MixerConfig):
    """Linear attention over a state that decays (lightning attention, arXiv 2405.17381), a matrix [D, D] for each head:

        state = exp(-slope) state + k^T v;    o = D^-0.5 q state

    With `qk_norm` each query and key head is normalised (RMSNorm), then rotated with `rope`. The heads of o together
    are normalised (`output_norm`) and multiplied by sigmoid(gate(x)) (`output_gate`).
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
        """The decay rate of each head: 2^(-8 (h + 1) / H), the slopes of ALiBi (arXiv 2108.12409), in every layer.

        If the number of heads H is no power of two, they are the slopes for the power below it, followed by every other
        slope for the power above.
        """
        below = 2 ** floor(log2(self.num_heads))
        above = _slopes_of_power(2 * below)[::2]
        return (*_slopes_of_power(below), *above[: self.num_heads - below])


def _slopes_of_power(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8 * (head + 1) / count) for head in range(count))


@dataclass(frozen=True)
class GatedMlp(MlpConfig):
    """The gated mlp down(silu(gate(x)) * up(x)), with `intermediate_size` columns between its products.

    With `fatrelu`, a threshold, FATReLU takes the place of SiLU: the gate is kept where it is above it, else 0.
    """

    intermediate_size: int
    fatrelu: float | None = None


@dataclass(frozen=True)
class ExpertsMlp(MlpConfig):
    """Gated mlps of which each token takes the `experts_per_token` that the router scores highest.

    The router is a matrix [num_experts, hidden]. The outputs of a token's chosen experts are multiplied by the softmax
    of their scores. Each expert has `intermediate_size` columns between its products.
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
