"""EAGLE-2 and EAGLE-3 drafts in torch: one decoder layer over the embedding of the next token and target features.

Row q joins the embedding of token q + 1 with the target's features of token q, has rotary position q and predicts
token q + 2. Sources: EAGLE-2 (arXiv 2406.16858) with the input norms of MiniCPM's, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from demo_model.network import FeedForward, Projection, RMSNorm, rotate
from torch import Tensor, nn

from cpmrt.dtypes import F32, Array
from draft_training.files import DraftConfig
from draft_training.target import Target


class DraftAttention(nn.Module):
    """The projections of grouped-query attention; `inputs` is the width that q, k and v read."""

    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        q_size, kv_size = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.head_dim = config.head_dim
        self.q_proj, self.k_proj = Projection(inputs, q_size), Projection(inputs, kv_size)
        self.v_proj, self.o_proj = Projection(inputs, kv_size), Projection(q_size, config.hidden_size)

    def heads(self, projection: Projection, x: Tensor) -> Tensor:
        """Returns a projection of x [..., n] split into heads [..., heads, D]."""
        return projection(x).unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries, rotated keys and values [..., heads, D]; x is [..., n], cos and sin [..., D / 2]."""
        query, key, value = (self.heads(projection, x) for projection in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return rotate(query, cos, sin), rotate(key, cos, sin), value


class DraftLayer(nn.Module):
    """A decoder layer without its attention, which the caller computes, as drafted rows see only their own paths."""

    def __init__(self, config: DraftConfig, joined: int) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, joined * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """Returns the layer's output [..., h] from the attention output [..., heads, D]."""
        h = residual + self.self_attn.o_proj(mixed.flatten(-2)) * self.residual_scale
        return h + self.mlp(self.post_attention_layernorm(h)) * self.residual_scale


class Draft(nn.Module):
    """The base of all drafts: it holds the target, and reads and returns weights by their names in the file."""

    prefix = ""

    def __init__(self, config: DraftConfig, target: Target) -> None:
        super().__init__()
        self.config, self.target = config, target

    def reset_parameters(self) -> None:
        """Draws random matrices that keep the magnitude of their inputs; norms stay one."""
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def tensors(self) -> dict[str, F32]:
        """Returns the weights by their names in the file."""
        return {self.prefix + name: tensor.detach().cpu().numpy() for name, tensor in self.state_dict().items()}

    def load(self, tensors: Mapping[str, F32]) -> None:
        """Loads weights as `tensors` returns them."""
        state = {name.removeprefix(self.prefix): torch.from_numpy(np.array(t)) for name, t in tensors.items()}
        self.load_state_dict(state)


class Eagle(Draft):
    """The base of both EAGLE drafts. Features are the target's in the first pass, later the draft's own output."""

    layer: DraftLayer

    def enter(self, embedded: Tensor, features: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        """Returns the residual stream [..., h] and the inputs of q, k and v."""
        raise NotImplementedError

    def logits(self, output: Tensor) -> Tensor:
        """Returns logits over the draft's vocabulary [..., V]."""
        raise NotImplementedError


class Eagle2(Eagle):
    """Predicts the target's next hidden state, which the target's own head reads."""

    prefix = "model."

    def __init__(self, config: DraftConfig, target: Target) -> None:
        super().__init__(config, target)
        self.input_norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = Projection(2 * config.hidden_size, config.hidden_size)
        self.eagle_layers = nn.ModuleList([DraftLayer(config, 1)])
        self.reset_parameters()

    @property
    def layer(self) -> DraftLayer:
        return self.eagle_layers[0]

    def enter(self, embedded: Tensor, features: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        u = self.fc(torch.cat((self.input_norm1(embedded), self.input_norm2(features)), dim=-1))
        return u, self.layer.input_layernorm(u)

    def logits(self, output: Tensor) -> Tensor:
        return self.target.logits(output)


class Eagle3(Eagle):
    """Reads three of the target's layers and has its own head over the most frequent tokens."""

    def __init__(self, config: DraftConfig, target: Target, token_ids: Tensor) -> None:
        super().__init__(config, target)
        self.fc = Projection(3 * config.hidden_size, config.hidden_size)
        self.midlayer = DraftLayer(config, 2)
        self.midlayer.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Projection(config.hidden_size, config.vocab_size)
        self.reset_parameters()
        with torch.no_grad():
            self.norm.weight.copy_(target.weights["norm"])
            self.lm_head.weight.copy_(target.head[token_ids] / target.config.logit_divisor)

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    def enter(self, embedded: Tensor, features: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        u = self.fc(features) if is_first else features
        layer = self.midlayer
        return u, torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(u)), dim=-1)

    def logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(output))


def make_eagle(config: DraftConfig, target: Target, token_ids: Array | None) -> Eagle:
    """Makes a draft on the target's device. `token_ids` are the target ids of the rows of an EAGLE-3 head."""
    if config.method == "eagle2":
        return Eagle2(config, target).to(target.device)
    if token_ids is None:
        raise ValueError("an EAGLE-3 draft needs its vocabulary")
    return Eagle3(config, target, torch.from_numpy(token_ids).to(target.device)).to(target.device)


def features_of(draft: Eagle, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the features that the draft reads of rows [B, L], and the target's last hidden states."""
    hidden, tapped = draft.target.hidden_states(tokens, draft.config.taps)
    return (hidden if tapped is None else tapped), hidden
