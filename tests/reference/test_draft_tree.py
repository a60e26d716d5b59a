"""reference/draft_tree.py against recursion over all candidates, and paths and matches found by trying everything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.config import TreeShape
from cpmrt.dtypes import F32, Array
from cpmrt.reference.draft_tree import Nodes, TreeGrowth, accept, chain_nodes, lookup, top_k

SHAPES = (
    TreeShape(),
    TreeShape(4, 10, 32),
    TreeShape(5, 8, 64),
    TreeShape(1, 32, 33),
    TreeShape(1, 5, 2),
    TreeShape.chain(1),
    TreeShape.chain(32),
    TreeShape(3, 1, 3),
    TreeShape(2, 31, 64),
    TreeShape(6, 2, 20),
)
VOCAB = 50


@dataclass(frozen=True)
class Candidate:
    """One drafted token of the naive tree; `order` is its number among all candidates of all passes."""

    order: int
    token: int
    score: np.float32
    parent: Candidate | None
    row: int

    def ancestry(self) -> list[Candidate]:
        """Return the candidates of its path, from the first level down to itself."""
        return [*(self.parent.ancestry() if self.parent else []), self]

    def before(self, other: Candidate) -> bool:
        return self.score > other.score or (self.score == other.score and self.order < other.order)


def best_of(candidates: list[Candidate], count: int) -> list[Candidate]:
    """Return the best `count` candidates, ranked by counting for each how many go before it."""
    ranked = {sum(other.before(one) for other in candidates): one for one in candidates}
    return [ranked[rank] for rank in range(count)]


def drafted(rng: np.random.Generator, shape: TreeShape, kind: str) -> list[tuple[Array, F32]]:
    """Return random ids and log-probabilities of each pass; `ties` has few different values, `gaps` rows of -inf."""
    passes = []
    for level in range(shape.num_passes):
        rows = 1 if level == 0 else shape.top_k
        ids = np.stack([rng.permutation(VOCAB)[: shape.top_k] for _ in range(rows)]).astype(np.int32)
        values = rng.integers(0, 3, (rows, shape.top_k)) / -2 if kind == "ties" else -rng.exponential(2, ids.shape)
        logprobs = -np.sort(-values.astype(np.float32), axis=1)
        if kind == "gaps" and level:
            logprobs[rng.random(rows) < 0.4] = -np.inf
        passes.append((ids, logprobs))
    return passes


def naive(shape: TreeShape, passes: list[tuple[Array, F32]]) -> tuple[list[list[Candidate]], list[Candidate]]:
    """Return the frontiers, one for each pass after the first, and the chosen candidates."""
    k, everything, frontiers = shape.top_k, [], []
    parents: list[Candidate | None] = [None]
    for level, (ids, logprobs) in enumerate(passes):
        newest = []
        for i, parent in enumerate(parents):
            for j in range(k):
                score = np.float32(logprobs[i, j] + (parent.score if parent else np.float32(0)))
                newest.append(Candidate(len(everything) + i * k + j, int(ids[i, j]), score, parent, i))
        everything += newest
        if level + 1 < len(passes):
            frontiers.append(best_of(newest, k))
            parents = list(frontiers[-1])
    return frontiers, best_of(everything, shape.tree_size - 1)


@pytest.mark.parametrize("kind", ["plain", "ties", "gaps"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_is_the_naive_one(shape: TreeShape, kind: str) -> None:
    passes = drafted(np.random.default_rng([shape.num_passes, shape.top_k, len(kind)]), shape, kind)
    frontiers, chosen = naive(shape, passes)
    growth = TreeGrowth(shape)
    growth.grow(passes[0][0][:1], passes[0][1][:1])
    for level, expected in enumerate(frontiers):
        rows = growth.frontier
        assert rows.tokens.tolist() == [one.token for one in expected]
        assert rows.parent_rows.tolist() == [one.row for one in expected]
        for mask, one in zip(rows.masks.tolist(), expected, strict=True):
            places = [frontiers[depth].index(other) for depth, other in enumerate(one.ancestry())]
            assert mask == sum(1 << (depth * shape.top_k + place) for depth, place in enumerate(places))
        growth.grow(*passes[level + 1])
    nodes = growth.nodes(7)
    assert nodes.tokens.tolist() == [7, *(one.token for one in chosen)]
    assert nodes.depths.tolist() == [0, *(len(one.ancestry()) for one in chosen)]
    numbers = {one.order: node for node, one in enumerate(chosen, 1)}
    for node, one in enumerate(chosen, 1):
        line = [0, *(numbers[other.order] for other in one.ancestry())]
        assert nodes.parents[node] == line[-2] < node
        assert int(nodes.masks[node]) == sum(1 << other for other in line)
    assert (nodes.parents[0], nodes.masks[0]) == (-1, 1)
    assert max(nodes.depths) + 1 <= shape.max_emitted


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_top_k_orders_by_value_then_by_id(values: list[int], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    k = data.draw(st.integers(1, len(values)))
    ids, logprobs = top_k(logits, k)
    assert ids.tolist() == sorted(range(len(values)), key=lambda token: (-values[token], token))[:k]
    total = sum(np.exp(np.float64(value)) for value in values)
    np.testing.assert_allclose(logprobs, [values[token] - np.log(total) for token in ids], rtol=1e-5, atol=1e-5)


def test_top_k_of_the_masked() -> None:
    ids, logprobs = top_k(np.array([-np.inf, 0, -np.inf], np.float32), 3)
    assert (ids.tolist(), logprobs.tolist()) == ([1, 0, 2], [0, -np.inf, -np.inf])


def trees() -> st.SearchStrategy[Nodes]:
    """Draw any tree of up to 64 nodes in which siblings differ, over few tokens so that much is accepted."""

    def build(choices: list[tuple[int, int]]) -> Nodes:
        tokens, parents, depths, masks = [1], [-1], [0], [1]
        for pick, token in choices:
            parent = pick % len(tokens)
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            masks.append(masks[parent] | 1 << len(tokens))
            depths.append(depths[parent] + 1)
            tokens.append(token)
            parents.append(parent)
        return Nodes(np.array(tokens), np.array(parents), np.array(depths), np.array(masks, np.uint64))

    return st.lists(st.tuples(st.integers(0, 63), st.integers(0, 4)), max_size=63).map(build)


@examples(100)
@given(trees(), st.lists(st.integers(0, 4), min_size=64, max_size=64))
def test_the_accepted_path_is_the_only_longest_one(nodes: Nodes, sampled: list[int]) -> None:
    def line(node: int) -> list[int]:
        return [*line(int(nodes.parents[node])), node] if node else [0]

    lines = [line(node) for node in range(len(nodes.tokens))]
    right = [path for path in lines if all(nodes.tokens[b] == sampled[a] for a, b in zip(path, path[1:], strict=False))]
    assert accept(nodes, sampled) == max(right, key=len)


def test_a_chain() -> None:
    nodes = chain_nodes(5, [6, 7], 5)
    assert nodes.tokens.tolist() == [5, 6, 7, 0, 0]
    assert nodes.parents.tolist() == [-1, 0, 1, -1, -1]
    assert nodes.depths.tolist() == [0, 1, 2, 0, 0]
    assert nodes.masks.tolist() == [1, 3, 7, 0, 0]
    assert accept(nodes, [6, 7, 0, 0, 0]) == [0, 1, 2]
    assert accept(chain_nodes(5, [], 3), [0, 0, 0]) == [0]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 12))
def test_lookup_copies_what_followed_the_longest_latest_match(history: list[int], num_drafted: int) -> None:
    last, best = len(history) - 1, (0, -1)
    for end in range(last):
        length = 0
        while length < 3 and end - length >= 0 and history[end - length] == history[last - length]:
            length += 1
        best = max(best, (length, end))
    length, end = best
    text = list(history)
    for i in range(num_drafted if length else 0):
        text.append(text[end + 1 + i])
    assert lookup(history, num_drafted) == text[last + 1 :]


def test_lookup_goes_round_a_repetition() -> None:
    assert lookup([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert lookup([4, 4], 3) == [4, 4, 4]
    assert lookup([1, 2, 3], 4) == []
