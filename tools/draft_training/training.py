"""Trains a draft on the target's own text: soft labels, and several passes over the draft's own output.

The passes after the first are EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): in pass s row q stands for
the s-th drafted token after a root at row q - s, so its features are the output of pass s - 1 at row q - 1, and it sees
the first pass up to the root and one row of each pass since.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from demo_model.muon import Muon, learning_rate_factor
from torch import Tensor
from torch.nn import functional as F

from draft_training.draft import Draft, Eagle, features_of
from draft_training.dspark import DSpark
from draft_training.target import causal_attention


@dataclass(frozen=True)
class DraftPlan:
    """The settings of a run, which ends after `steps` steps or `minutes` minutes, whichever comes first."""

    minutes: float
    steps: int
    rows: int
    seed: int = 1
    num_passes: int = 3
    pass_decay: float = 0.8
    learning_rate: float = 0.01
    hidden_weight: float = 0.1
    num_roots: int = 32
    """The number of blocks of each row that a step trains a DSpark draft on."""
    warm_up_end: float = 0.02
    decay_start: float = 0.4
    log_steps: int = 50


def path_mask(length: int, num_passes: int, device: torch.device) -> Tensor:
    """Returns which keys the rows of the last of `num_passes` passes see: bool [L, passes * L], pass after pass."""
    query, key = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    last = num_passes - 1
    parts = [key <= query - last, *(key == query - last + j for j in range(1, num_passes))]
    return torch.cat(parts, dim=1)


class PassAttention:
    """Attention of successive passes; it keeps the keys and values of all passes so far."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the attention output of the rows [B, L, heads, D] of the next pass."""
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:
            return causal_attention(query, key, value).transpose(1, 2)
        mask = path_mask(query.shape[2], len(self.keys), query.device)
        # KV heads are repeated, as no fused kernel of torch takes both a mask and grouped queries.
        group = query.shape[1] // key.shape[1]
        keys, values = (torch.cat(parts, 2).repeat_interleave(group, 1) for parts in (self.keys, self.values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask).transpose(1, 2)


def pass_outputs(draft: Eagle, embedded: Tensor, features: Tensor, num_passes: int) -> list[Tensor]:
    """Returns the draft's output [B, L, h] of every pass over rows of embeddings and target features."""
    cos, sin = draft.target.cos[: embedded.shape[1]], draft.target.sin[: embedded.shape[1]]
    attend, outputs = PassAttention(), list[Tensor]()
    for index in range(num_passes):
        residual, x = draft.enter(embedded, features, index == 0)
        output = draft.layer.finish(residual, attend(*draft.layer.self_attn(x, cos, sin)))
        outputs.append(output)
        features = F.pad(output[:, :-1], (0, 0, 1, 0))
    return outputs


def soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Returns the cross entropy, in nats, of each row [...] with a distribution [..., V].

    It may be a part of a distribution, whose sum is below one: the missing probability then counts nothing.
    """
    logits = logits.float()
    mass = probabilities.sum(-1)
    return mass * logits.logsumexp(-1) - (probabilities * logits).sum(-1)


def eagle_losses(draft: Eagle, tokens: Tensor, token_ids: Tensor | None, plan: DraftPlan) -> tuple[Tensor, Tensor]:
    """Returns the loss to minimise and the mean cross entropy of every pass, for rows [B, L + 1]."""
    features, hidden = features_of(draft, tokens)
    with torch.no_grad():
        probabilities = draft.target.logits(hidden[:, 1:]).float().softmax(-1)
        if token_ids is not None:
            probabilities = probabilities[..., token_ids]
    outputs = pass_outputs(draft, draft.target.embed(tokens[:, 1:]), features[:, :-1], plan.num_passes)
    total, entropies = torch.zeros((), device=tokens.device), []
    for index, output in enumerate(outputs):
        # Rows before `index` have no root.
        rows = slice(index, None)
        entropy = soft_cross_entropy(draft.logits(output[:, rows]), probabilities[:, rows]).mean()
        entropies.append(entropy.detach())
        weight = plan.pass_decay**index
        total = total + weight * entropy
        if draft.config.method == "eagle2":
            near = F.smooth_l1_loss(output[:, rows].float(), hidden[:, 1:][:, rows].float())
            total = total + weight * plan.hidden_weight * near
    return total, torch.stack(entropies)


class DraftTrainer:
    """Trains a draft on rows `tokens` [N, L + 1]; `token_ids` are the target ids of the rows of a cut head."""

    def __init__(self, draft: Draft, tokens: Tensor, token_ids: Tensor | None, plan: DraftPlan) -> None:
        self.draft, self.tokens, self.token_ids, self.plan = draft, tokens, token_ids, plan
        parameters = dict(draft.named_parameters())
        heads = ("lm_head", "markov_head", "confidence_head")
        is_matrix = {name: p.dim() == 2 and not name.startswith(heads) for name, p in parameters.items()}
        self.muon = Muon([p for name, p in parameters.items() if is_matrix[name]])
        others = [p for name, p in parameters.items() if not is_matrix[name]]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
        self.generator = torch.Generator(tokens.device).manual_seed(plan.seed)

    def losses(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of rows [B, L + 1], and the mean cross entropy of each pass, or of each place in a block."""
        draft, plan = self.draft, self.plan
        if isinstance(draft, DSpark):
            return draft.losses(tokens, self._roots(tokens))
        assert isinstance(draft, Eagle)
        return eagle_losses(draft, tokens, self.token_ids, plan)

    def _roots(self, tokens: Tensor) -> Tensor:
        """Returns random roots [B, A] in rows [B, L + 1] that are followed by a whole block of tokens."""
        last = tokens.shape[1] - self.draft.config.block_size
        shape = len(tokens), self.plan.num_roots
        return torch.randint(1, last, shape, generator=self.generator, device=tokens.device)

    def step(self, factor: float) -> Tensor:
        """Makes one optimiser step and returns the cross entropies without waiting for them."""
        plan, tokens = self.plan, self.tokens
        index = torch.randint(len(tokens), (plan.rows,), generator=self.generator, device=tokens.device)
        loss, entropies = self.losses(tokens[index].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.adam.param_groups[0]["params"], 1.0)
        self.adam.param_groups[0]["lr"] = plan.learning_rate * 0.2 * factor
        self.adam.step()
        self.adam.zero_grad()
        self.muon.step(plan.learning_rate * factor)
        return entropies

    def run(self, report: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """Trains to the end and returns the summary; `report` is called with figures every `log_steps` steps."""
        plan, begun, steps = self.plan, time.perf_counter(), 0
        recent: list[Tensor] = []
        last: list[float] = []
        while (progress := self._progress(steps, begun)) < 1:
            recent.append(self.step(learning_rate_factor(progress, plan.warm_up_end, plan.decay_start, first=1e-3)))
            steps += 1
            if steps % plan.log_steps == 0 or steps == plan.steps:
                last = [round(value, 4) for value in torch.stack(recent).mean(0).tolist()]
                recent.clear()
                report({"step": steps, "seconds": round(time.perf_counter() - begun, 1), "cross_entropy": last})
        last = last or [round(value, 4) for value in torch.stack(recent).mean(0).tolist()]
        return {
            "steps": steps,
            "tokens": steps * plan.rows * (self.tokens.shape[1] - 1),
            "seconds": round(time.perf_counter() - begun, 1),
            "cross_entropy": last,
        }

    def _progress(self, steps: int, begun: float) -> float:
        return max(steps / self.plan.steps, (time.perf_counter() - begun) / (60 * self.plan.minutes))


def frequent_tokens(tokens: Tensor, vocab_size: int, count: int, always: tuple[int, ...]) -> Tensor:
    """Returns the ids [count], ascending, of the tokens in `always` and of the most frequent others."""
    counts = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def rarest_token(tokens: Tensor, vocab_size: int) -> int:
    """Returns the id of the least frequent token, the lowest of several."""
    return int(torch.bincount(tokens.flatten().long(), minlength=vocab_size).argmin())
