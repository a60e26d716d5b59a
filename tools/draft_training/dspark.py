"""DSpark drafts in torch: blocks of tokens after roots, which attend to keys and values from the target's states.

The rows of a block are its root and mask tokens after it, at consecutive positions. They see the target's states of all
positions before the root, through `fc` and a norm, and each other. Row k predicts the token after its own position,
with a Markov head that is given the token at that position. Source: see `cpmrt/config/dspark.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from demo_model.network import FeedForward, Projection, RMSNorm, rotate
from torch import Tensor, nn

from cpmrt.config.speculation import TreeShape
from draft_training.draft import Draft, DraftAttention
from draft_training.files import DraftConfig
from draft_training.target import Target

CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0
"""The weights of the three parts of the loss."""
DECAY = 4.0
"""The loss of a block's k-th token (from 0) weighs exp(-k / DECAY): it matters only if all before it are accepted."""


@dataclass(frozen=True)
class Blocks:
    """The rows of all blocks: `positions` [B, R], and `seen`, bool [B, 1, R, L + R]: which of the target's L positions
    and of the R rows each row attends to."""

    positions: Tensor
    seen: Tensor


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3 whose rows also attend to keys and values of the target's states."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.self_attn.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.self_attn.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the output [B, R, h]. `context` [B, L, h] has the target's states; `cos`, `sin` are whole tables."""
        attention, normed = self.self_attn, self.input_layernorm(x)
        before = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        positions = torch.cat((before, blocks.positions), dim=1)
        both = torch.cat((context, normed), dim=1)
        heads = attention.heads
        query = turned(attention.q_norm(heads(attention.q_proj, normed)), blocks.positions, cos, sin)
        key = turned(attention.k_norm(heads(attention.k_proj, both)), positions, cos, sin)
        value = heads(attention.v_proj, both)
        group = query.shape[2] // key.shape[2]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=blocks.seen)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DSpark(Draft):
    """A DSpark draft: layers over blocks, a Markov head and a confidence head."""

    def __init__(self, config: DraftConfig, target: Target) -> None:
        super().__init__(config, target)
        hidden, rank = config.hidden_size, config.markov_rank
        self.fc = Projection(len(config.taps) * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList([BlockLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.markov_head = nn.ModuleDict(
            {"markov_w1": nn.Embedding(config.vocab_size, rank), "markov_w2": Projection(rank, config.vocab_size)}
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + rank, 1)})
        self.reset_parameters()
        with torch.no_grad():
            self.norm.weight.copy_(target.weights["norm"])
            nn.init.zeros_(self.markov_head["markov_w2"].weight)
            nn.init.zeros_(self.confidence_head["proj"].weight)
            nn.init.zeros_(self.confidence_head["proj"].bias)

    def states(self, tokens: Tensor, features: Tensor, roots: Tensor) -> Tensor:
        """Returns the normalised outputs [B, A, S, h] of the blocks that begin at `roots` [B, A] in tokens [B, L + 1].

        `features` [B, L, n] are the target's tapped states of the first L tokens.
        """
        size, target = self.config.block_size, self.target
        entering = torch.full((*roots.shape, size), self.config.mask_token_id, device=tokens.device)
        entering[..., 0] = tokens.gather(1, roots)
        x = target.embed(entering.flatten(1))
        context = self.hidden_norm(self.fc(features))
        blocks = blocks_behind(roots, size, features.shape[1], len(target.cos))
        for layer in self.layers:
            x = layer(x, context, blocks, target.cos, target.sin)
        return self.norm(x).unflatten(1, roots.shape[1:] + (size,))

    def block_logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Returns the logits [..., V] of rows; `previous` [...] are the tokens before the predicted ones."""
        markov = self.markov_head["markov_w2"](self.markov_head["markov_w1"](previous))
        return self.target.logits(states) + markov

    def confidence(self, states: Tensor, previous: Tensor) -> Tensor:
        """Returns the confidences [...] as logits; `previous` [...] are the tokens before the predicted ones."""
        embedded = self.markov_head["markov_w1"](previous)
        return self.confidence_head["proj"](torch.cat((states.float(), embedded), dim=-1)).squeeze(-1)

    def losses(self, tokens: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss to minimise, and the mean cross entropy of each place in the blocks at `roots` [B, A]."""
        hidden, features = self.target.hidden_states(tokens[:, :-1], self.config.taps)
        assert features is not None
        states = self.states(tokens, features, roots)
        places = roots[..., None] + torch.arange(self.config.block_size, device=tokens.device)
        previous, truth = (tokens.gather(1, (places + ahead).flatten(1)).view_as(places) for ahead in (0, 1))
        with torch.no_grad():
            wanted = torch.stack([row[place] for row, place in zip(hidden, places, strict=True)])
            target = self.target.logits(wanted).float().softmax(-1)
        logits = self.block_logits(states, previous).float()
        entropy = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none").view_as(places)
        distance = 0.5 * (logits.softmax(-1) - target).abs().sum(-1)
        # The draft proposes its likeliest token, which is accepted with the probability that the target samples it.
        accepted = target.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
        doubt = F.binary_cross_entropy_with_logits(
            self.confidence(states.detach(), previous).float(), accepted, reduction="none"
        )
        weights = torch.exp(-torch.arange(places.shape[-1], device=tokens.device) / DECAY)
        total = CROSS_ENTROPY * entropy + TOTAL_VARIATION * distance + CONFIDENCE * doubt
        return (total * (weights / weights.sum())).sum(-1).mean(), entropy.detach().mean((0, 1))


def blocks_behind(roots: Tensor, size: int, length: int, num_positions: int) -> Blocks:
    """Returns the rows of blocks of `size` that begin at `roots` [B, A], for a target that has run `length` positions.

    Positions beyond the rotary table of `num_positions` are clamped to its last one.
    """
    places = (roots[..., None] + torch.arange(size, device=roots.device)).flatten(1)
    before = torch.arange(length, device=roots.device) < roots.repeat_interleave(size, 1)[..., None]
    block = torch.arange(places.shape[1], device=roots.device) // size
    together = (block[:, None] == block).expand(len(roots), -1, -1)
    return Blocks(places.clamp(max=num_positions - 1), torch.cat((before, together), dim=2)[:, None])


def turned(heads: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [B, R, heads, D] rotated to their positions [B, R]."""
    return rotate(heads, cos[positions][:, :, None], sin[positions][:, :, None])


class BlockDrafter:
    """Drafts a chain at every position of rows [B, L + 1]; roots are tokens 1..L."""

    def __init__(self, draft: DSpark, shape: TreeShape, roots_at_once: int = 64) -> None:
        self.draft, self.shape, self.roots_at_once = draft, shape, roots_at_once

    @torch.no_grad()
    def accepted(self, tokens: Tensor) -> Tensor:
        """Returns the number of drafted tokens accepted at every root: int [B, L]. None are beyond the row's end."""
        draft = self.draft
        _, features = draft.target.hidden_states(tokens[:, :-1], draft.config.taps)
        assert features is not None
        roots = torch.arange(1, tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        parts = [self._accepted(tokens, features, part) for part in roots.split(self.roots_at_once, dim=1)]
        return torch.cat(parts, dim=1)

    def _accepted(self, tokens: Tensor, features: Tensor, roots: Tensor) -> Tensor:
        draft, length = self.draft, min(self.shape.num_passes, self.draft.config.block_size)
        states, previous = draft.states(tokens, features, roots), tokens.gather(1, roots)
        padded = F.pad(tokens, (0, length), value=-1)
        count, is_alive = torch.zeros_like(roots), torch.ones_like(roots, dtype=torch.bool)
        for place in range(length):
            previous = draft.block_logits(states[:, :, place], previous).argmax(-1)
            is_alive = is_alive & (previous == padded.gather(1, roots + 1 + place))
            count += is_alive
        return count
