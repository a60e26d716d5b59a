"""The definition of draft trees: how they grow, which nodes are verified, which path is accepted. Plain NumPy.

Candidates as EAGLE-2 has them (arXiv 2406.16858): the first pass gives `top_k` tokens after the root; every further
pass looks at the `top_k` best of the newest and gives `top_k` tokens after each. The `tree_size - 1` best of all, by
cumulative log-probability, are verified. All sums are float32. Among equals the lower index goes first, so a parent,
never worse than its children and older than they are, always goes before them. A tree of `top_k` 1 is a chain.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from cpmrt.config import TreeShape
from cpmrt.config.speculation import LONGEST_MATCH
from cpmrt.dtypes import F32, Array
from cpmrt.log_probabilities import log_softmax


@dataclass(frozen=True)
class Nodes:
    """The rows of a target pass. Node 0 is the root; a parent goes before its children.

    tokens, parents, depths int32 [S]; masks uint64 [S]: bit i stands for node i, an ancestor or the node itself. The
    root has parent -1; so has a node that is not there (`chain_nodes`, `without_others`), with token, depth and
    mask 0.
    """

    tokens: Array
    parents: Array
    depths: Array
    masks: Array


@dataclass(frozen=True)
class Frontier:
    """The rows of a draft pass, [top_k] each: their tokens, and the rows of the pass before that they follow.

    Bit (d - 1) * top_k + i of a row's mask (uint64) stands for row i of pass d, an ancestor or the row itself.
    """

    tokens: Array
    parent_rows: Array
    masks: Array


def top_k(logits: F32, k: int) -> tuple[Array, F32]:
    """Return ids and log-probabilities [k] of the best tokens of a row [V], largest logit first, then lowest id."""
    ids = np.argsort(-logits, kind="stable")[:k]
    return ids.astype(np.int32), log_softmax(logits)[ids]


class TreeGrowth:
    """The candidates of one step. Call `grow` for each pass, whose rows are those of `frontier`, then `nodes`."""

    frontier: Frontier
    """The rows of the next pass; every `grow` but that of the last pass sets it."""

    def __init__(self, shape: TreeShape):
        self._shape = shape
        self._tokens = np.zeros(0, np.int32)
        self._scores = np.zeros(0, np.float32)
        self._parents = np.zeros(0, np.int64)
        self._newest = np.full(1, -1)
        self._num_passes = 0

    def grow(self, ids: Array, logprobs: F32) -> None:
        """Take the candidates that a pass gives after each of its rows, best first: [1, top_k] after the root, which is
        the row of the first pass, then [top_k, top_k] after the rows of `frontier`.

        A row that had no room for its keys has log-probabilities of -inf.
        """
        scores = logprobs.astype(np.float32)
        if self._num_passes:
            scores = self._scores[self._newest][:, None] + scores
        self._add(np.repeat(self._newest, self._shape.top_k), ids.reshape(-1), scores.reshape(-1))

    def nodes(self, root_token: int) -> Nodes:
        """Return the root and the best candidates, best first."""
        best = _best(self._scores, self._shape.tree_size - 1)
        node_of = {-1: 0} | {int(candidate): node for node, candidate in enumerate(best, 1)}
        parents = [-1, *(node_of[int(self._parents[candidate])] for candidate in best)]
        return _tree([root_token, *self._tokens[best].tolist()], parents)

    def _add(self, parents: Array, ids: Array, scores: F32) -> None:
        first, k, depth = len(self._tokens), self._shape.top_k, self._num_passes
        self._tokens = np.concatenate([self._tokens, ids.astype(np.int32)])
        self._scores = np.concatenate([self._scores, scores])
        self._parents = np.concatenate([self._parents, parents])
        self._num_passes += 1
        if self._num_passes == self._shape.num_passes:
            return  # no pass follows, and its rows may be more than a mask has bits
        best = _best(scores, k)
        parent_rows = best // k  # of the first pass, which has one row: 0
        masks = np.uint64(1) << np.arange(depth * k, (depth + 1) * k).astype(np.uint64)
        if depth:
            masks |= self.frontier.masks[parent_rows]
        self._newest = first + best
        self.frontier = Frontier(self._tokens[self._newest], parent_rows.astype(np.int32), masks)


def chain_nodes(root_token: int, tokens: Sequence[int], size: int) -> Nodes:
    """Return `size` nodes: a chain of `tokens`, at most `size` - 1 of them, behind the root; the rest are not there."""
    chain, missing = [root_token, *tokens], size - 1 - len(tokens)
    return _tree([*chain, *[0] * missing], [*range(-1, len(tokens)), *[-1] * missing])


def without_others(nodes: Nodes, left: Container[int]) -> Nodes:
    """Return the nodes, with those cut that are not in `left`, which has the root and with each node its parent."""
    cut = [node for node in range(len(nodes.tokens)) if node not in left]
    tokens, parents, depths, masks = (of.copy() for of in (nodes.tokens, nodes.parents, nodes.depths, nodes.masks))
    tokens[cut], parents[cut], depths[cut], masks[cut] = 0, -1, 0, 0
    return Nodes(tokens, parents, depths, masks)


def accept(nodes: Nodes, sampled: Sequence[int] | Array) -> list[int]:
    """Return the path of nodes, from the root on, on which each token equals the one sampled at its parent.

    `sampled` [S]: the target's token after each node. The step yields `sampled[node]` for every node of the path.
    """
    path = [0]
    for node in range(1, len(nodes.tokens)):
        if nodes.parents[node] == path[-1] and nodes.tokens[node] == sampled[path[-1]]:
            path.append(node)
    return path


def lookup(history: Sequence[int] | Array, num_drafted: int, shortest_match: int = 1) -> list[int]:
    """Return the tokens after the most recent earlier occurrence of the last three tokens, else two, else one.

    This is prompt lookup. `history`: all tokens, the root last. Where the tokens after the occurrence reach the end of
    the history, the draft goes on with its own first tokens. It is empty if the last `shortest_match` tokens never
    occurred before.
    """
    tokens = np.asarray(history, np.int64)
    last = len(tokens) - 1
    for length in range(min(LONGEST_MATCH, last), shortest_match - 1, -1):
        ends = np.arange(length - 1, last)
        matches = np.all([tokens[ends - back] == tokens[last - back] for back in range(length)], axis=0)
        if matches.any():
            end = int(ends[matches][-1])
            return [int(tokens[end + 1 + i % (last - end)]) for i in range(num_drafted)]
    return []


def _best(scores: F32, count: int) -> Array:
    return np.argsort(-scores, kind="stable")[:count]


def _tree(tokens: list[int], parents: list[int]) -> Nodes:
    depths, masks = [0], [1]
    for node, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        masks.append(masks[parent] | 1 << node if parent >= 0 else 0)
    return Nodes(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int32), np.array(masks, np.uint64)
    )
