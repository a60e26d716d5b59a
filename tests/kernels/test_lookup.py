"""lookup.cu against `lookup` and `chain_nodes` of reference/draft_tree.py: drafts looked up in a sequence's own
tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speculation_oracle import Running
from tree_device import TARGET_ROW, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.config.speculation import LONGEST_MATCH
from cpmrt.reference.draft_tree import chain_nodes, lookup

pytestmark = pytest.mark.gpu


def check(device: TreeDevice, running: Running, shape: TreeShape) -> None:
    device.hold(running)
    device.begin(running)
    device.kernels.lookup(shape)
    drafted = [] if running.finished else lookup(running.tokens, shape.tree_size - 1)
    nodes, tree = chain_nodes(running.tokens[-1], drafted, shape.tree_size), device.tree()
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(tree[name][: shape.tree_size], getattr(nodes, name), name)
    assert device.rows(TARGET_ROW, shape.tree_size) == running.node_rows(nodes)


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
def test_what_followed_the_longest_latest_match(cuda: Any, portable: bool) -> None:
    device, rng = TreeDevice(cuda, portable=portable), np.random.default_rng(1)
    for length in (1, 2, 3, 4, 17, 64, 200, 300):
        for num_tokens in (1, 2, 6, 90):
            tokens = rng.integers(0, num_tokens, length).tolist()
            running = Running(int(rng.integers(3)), tokens, capacity=320, max_context=320)
            check(device, running, TreeShape.chain(int(rng.integers(1, 17))))


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("length", [3, 11, 40])
def test_instead_of_a_tree_only_where_three_tokens_came_before(cuda: Any, length: int, portable: bool) -> None:
    """A looked-up chain replaces the tree only if the newest three tokens came before; else the tree's own nodes stay,
    and the rows behind them are padding."""
    device, rng, kinds = TreeDevice(cuda, portable=portable), np.random.default_rng(length), set[bool]()
    for num_tokens in (2, 6, 90):
        for count in (1, 3, 17, 64, 200):
            tokens = rng.integers(0, num_tokens, count).tolist()
            running = Running(int(rng.integers(3)), tokens, capacity=320, max_context=320)
            shape, before = TreeShape(12, 1, 13, length), lookup(tokens, 12)
            device.hold(running)
            device.begin(running)
            device.kernels.lookup(shape)  # a chain of twelve tokens as the tree that may be replaced
            device.kernels.lookup_instead(shape)
            found = lookup(tokens, length, LONGEST_MATCH)
            nodes, tree = chain_nodes(tokens[-1], found or before, shape.num_nodes), device.tree()
            for name in ("tokens", "parents", "depths"):
                np.testing.assert_array_equal(tree[name][: shape.num_nodes], getattr(nodes, name), name)
            assert device.rows(TARGET_ROW, shape.num_nodes) == running.node_rows(nodes)
            kinds.add(bool(found))
    assert kinds == {False, True}


def test_no_match_no_room_and_a_finished_sequence(cuda: Any) -> None:
    device = TreeDevice(cuda)
    check(device, Running(1, list(range(90)), capacity=320, max_context=320), TreeShape.chain(4))
    check(device, Running(1, [5] * 60, capacity=64, max_context=320), TreeShape.chain(16))
    check(device, Running(2, [5] * 60, capacity=320, max_context=320, finished=True), TreeShape.chain(3))


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("end", [2, 70_000, 131_000])
def test_a_long_history(cuda: Any, end: int, portable: bool) -> None:
    context = 131_072
    device, tokens = TreeDevice(cuda, max_context=context, portable=portable), np.zeros(context - 5, np.int64)
    tokens[:] = 1 + np.arange(len(tokens)) % 7
    tokens[-3:] = [50, 51, 52]
    tokens[end - 2 : end + 1] = [50, 51, 52]
    tokens[end + 20 if end < 100_000 else 40] = 52
    check(device, Running(2, tokens.tolist(), capacity=context, max_context=context), TreeShape.chain(8))
