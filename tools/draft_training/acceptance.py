"""Counts how many drafted tokens the target would accept, on text that it has written.

Speculation changes no token, so a step's outcome depends only on the position of its root. Therefore trees are drafted
at all positions of finished rows at once; the steps of a real generation are then found by walking over the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cpmrt.config.speculation import TreeShape
from draft_training.draft import Eagle, features_of
from draft_training.dspark import BlockDrafter
from draft_training.generation import Generated


@dataclass
class Frontier:
    """The drafted rows [B, L, k] of one pass, k for each root.

    `candidates` are their indices in `Candidates`; then their tokens, scores, features and ancestors.
    """

    candidates: Tensor
    tokens: Tensor
    scores: Tensor
    features: Tensor
    sees: Tensor
    """Whether a row of any pass so far is an ancestor of the row or the row itself: bool [B, L, k, passes * k]."""


@dataclass
class Candidates:
    """All drafted tokens of every root, [B, L, n] for each pass, with scores and indices of parents (-1: the root)."""

    tokens: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> None:
        for found, part in zip((self.tokens, self.scores, self.parents), (tokens, scores, parents), strict=True):
            found.append(part.flatten(2))


class TreeDrafter:
    """Drafts a tree at every position of rows [B, L + 1]; roots are tokens 1..L."""

    def __init__(self, draft: Eagle, token_ids: Tensor | None, shape: TreeShape) -> None:
        self.draft, self.token_ids, self.shape = draft, token_ids, shape

    @torch.no_grad()
    def accepted(self, tokens: Tensor) -> Tensor:
        """Returns the number of drafted tokens accepted at every root: int [B, L]. None are beyond the row's end."""
        found = self._drafted(tokens)
        names, scores, parents = (torch.cat(parts, 2) for parts in (found.tokens, found.scores, found.parents))
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.shape.tree_size - 1]
        is_node = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
        current = torch.full(scores.shape[:2], -1, device=tokens.device)
        count, is_alive = torch.zeros_like(current), torch.ones_like(current, dtype=torch.bool)
        for depth in range(self.shape.num_passes):
            truth = torch.nn.functional.pad(tokens[:, 2 + depth :], (0, min(1 + depth, scores.shape[1])), value=-1)
            hits = is_node & (parents == current[..., None]) & (names == truth[..., None])
            is_alive = is_alive & hits.any(-1)
            current = hits.int().argmax(-1)
            count += is_alive
        return count

    def _drafted(self, tokens: Tensor) -> Candidates:
        draft, top_k, embed = self.draft, self.shape.top_k, self.draft.target.embed
        features, _ = features_of(draft, tokens)
        length = tokens.shape[1] - 1
        cos, sin = draft.target.cos, draft.target.sin
        residual, x = draft.enter(embed(tokens[:, 1:]), features[:, :-1], True)
        query, key, value = draft.layer.self_attn(x, cos[:length], sin[:length])
        paths = PathAttention(key, value)
        none = torch.zeros(*query.shape[:2], 1, 0, dtype=torch.bool, device=tokens.device)
        output = draft.layer.finish(residual, paths.mix(query[:, :, None], none)[:, :, 0])
        scores, ids = self._best(output)
        found = Candidates()
        found.add(ids, scores, torch.full_like(ids, -1))
        own = torch.eye(top_k, dtype=torch.bool, device=tokens.device)
        frontier = Frontier(
            torch.arange(top_k, device=tokens.device).expand_as(ids), ids, scores,
            output[:, :, None].expand(-1, -1, top_k, -1), own.expand(*ids.shape[:2], -1, -1),
        )  # fmt: skip
        roots = torch.arange(length, device=tokens.device)
        for index in range(1, self.shape.num_passes):
            at = (roots + index).clamp(max=len(cos) - 1)[:, None]
            residual, x = draft.enter(embed(frontier.tokens), frontier.features, False)
            query, key, value = draft.layer.self_attn(x, cos[at], sin[at])
            paths.append(key, value)
            output = draft.layer.finish(residual, paths.mix(query, frontier.sees))
            frontier = self._next_frontier(frontier, output, found, index, own)
        return found

    def _best(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities and target ids of the best tokens [..., k]."""
        scores, ids = self.draft.logits(output).float().log_softmax(-1).topk(self.shape.top_k)
        return scores, ids if self.token_ids is None else self.token_ids[ids]

    def _next_frontier(self, old: Frontier, output: Tensor, found: Candidates, index: int, own: Tensor) -> Frontier:
        top_k = self.shape.top_k
        scores, ids = self._best(output)
        scores = scores + old.scores[..., None]
        found.add(ids, scores, old.candidates[..., None].expand_as(ids))
        flat = scores.flatten(2)
        best = flat.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        rows = best // top_k

        def of_rows(values: Tensor) -> Tensor:
            return values.gather(2, rows[..., None].expand(-1, -1, -1, values.shape[-1]))

        sees = torch.cat((of_rows(old.sees), own.expand(*rows.shape[:2], -1, -1)), dim=-1)
        first = top_k + (index - 1) * top_k**2
        return Frontier(first + best, ids.flatten(2).gather(2, best), flat.gather(2, best), of_rows(output), sees)


class PathAttention:
    """Attention of drafted rows over the real rows up to their root and over their drafted ancestors, in fp32."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.real = (key.float(), value.float())
        self.drafted: list[tuple[Tensor, Tensor]] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Adds the rows of one more pass, [B, L, k, kv heads, D]."""
        self.drafted.append((key.float(), value.float()))

    def mix(self, query: Tensor, sees: Tensor) -> Tensor:
        """Returns the attention output of queries [B, L, k, heads, D]; `sees` says which drafted rows each may see."""
        key, value = self.real
        length, kv_heads = key.shape[1:3]
        grouped = query.float().unflatten(3, (kv_heads, -1)) * query.shape[-1] ** -0.5
        scores = torch.einsum("bqihgd,bphd->bqihgp", grouped, key)
        is_past = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
        scores = scores.masked_fill(~is_past[:, None, None, None], -torch.inf)
        if not self.drafted:
            mixed = torch.einsum("bqihgp,bphd->bqihgd", scores.softmax(-1), value)
            return mixed.flatten(3, 4).to(query.dtype)
        keys, values = (torch.cat(parts, 2) for parts in zip(*self.drafted, strict=True))
        own = torch.einsum("bqihgd,bqnhd->bqihgn", grouped, keys)
        own = own.masked_fill(~sees[:, :, :, None, None], -torch.inf)
        weights = torch.cat((scores, own), dim=-1).softmax(-1)
        mixed = torch.einsum("bqihgp,bphd->bqihgd", weights[..., :length], value)
        mixed = mixed + torch.einsum("bqihgn,bqnhd->bqihgd", weights[..., length:], values)
        return mixed.flatten(3, 4).to(query.dtype)


@dataclass
class AcceptCounts:
    """The number of steps by accepted drafted tokens (a step emits one token more)."""

    histogram: list[int]

    @property
    def mean_length(self) -> float:
        """The mean number of tokens that a step gives."""
        steps = sum(self.histogram)
        return sum((count + 1) * n for count, n in enumerate(self.histogram)) / steps if steps else float("nan")

    def rates(self) -> list[float]:
        """Returns the share of steps that accepted a token at each depth, of those that accepted its parent."""
        reached = [sum(self.histogram[depth:]) for depth in range(len(self.histogram))]
        return [after / before if before else 0.0 for before, after in zip(reached, reached[1:], strict=False)]


def walk(accepted: np.ndarray, is_chosen: np.ndarray, depth: int) -> list[int]:
    """Returns the histogram of the steps that generate one row: `accepted` [L] at roots 1..L, `is_chosen` [L + 1].

    `is_chosen` marks the tokens that the target chose. Steps near the row's end, whose outcome is not known, are left
    out; the end of a text in the row cuts a step short.
    """
    histogram = [0] * (depth + 1)
    length, root = len(is_chosen), 1
    while root + depth + 1 < length:
        if not is_chosen[root + 1]:
            root += 1
            continue
        room = 1
        while room <= depth and is_chosen[root + 1 + room]:
            room += 1
        count = min(int(accepted[root - 1]), room - 1)
        histogram[count] += 1
        root += count + 1
    return histogram


def measure(
    drafter: TreeDrafter | BlockDrafter, text: Generated, rows_at_once: int = 8
) -> list[AcceptCounts]:
    """Returns the counts of accepted tokens for each source of the rows."""
    depth = drafter.shape.max_emitted - 1
    accepted = torch.cat([drafter.accepted(part) for part in text.tokens.split(rows_at_once)]).cpu().numpy()
    is_chosen, sources = text.is_chosen.cpu().numpy(), text.sources.cpu().numpy()
    totals = [[0] * (depth + 1) for _ in range(int(sources.max()) + 1)]
    for row, chosen, source in zip(accepted, is_chosen, sources, strict=True):
        totals[source] = [a + b for a, b in zip(totals[source], walk(row, chosen, depth), strict=True)]
    return [AcceptCounts(total) for total in totals]
