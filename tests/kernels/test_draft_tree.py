"""draft_tree.cu against reference/draft_tree.py, bit for bit: candidates, rows of every pass, and nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speculation_oracle import PADDING, Running
from tree_device import DRAFT_ROW, TARGET_ROW, VOCAB, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.reference.draft_tree import TreeGrowth

pytestmark = pytest.mark.gpu

SHAPES = (
    TreeShape(),
    TreeShape(4, 10, 32),
    TreeShape(5, 8, 64),
    TreeShape(1, 32, 33),
    TreeShape(1, 5, 2),
    TreeShape(2, 31, 64),
    TreeShape(3, 1, 4),
    TreeShape.chain(32),
    TreeShape(6, 2, 20),
)


def drafted(rng: np.random.Generator, rows: int, k: int, has_ties: bool) -> tuple[Any, Any]:
    """Return random ids and log-probabilities of a pass, best first in each row."""
    ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(rows)]).astype(np.int32)
    values = rng.integers(0, 3, (rows, k)) / 2 if has_ties else rng.exponential(2, (rows, k))
    return ids, -np.sort(values.astype(np.float32), axis=1)


def check_growth(device: TreeDevice, shape: TreeShape, running: Running, *, offset: int, has_ties: bool) -> int:
    """Grow a whole tree, check each pass and the nodes against the oracle, and return how many rows were padding for
    lack of room."""
    rng, k, growth = np.random.default_rng([shape.top_k, shape.num_passes, has_ties]), shape.top_k, TreeGrowth(shape)
    device.begin(running)
    ids, logprobs = drafted(rng, 1, k, has_ties)
    growth.grow(ids[:1], logprobs[:1])
    outputs = rng.integers(0, 2**16, (1, device.width), np.uint16)
    num_padding = 0
    for depth in range(1, shape.num_passes):
        device.set("draft_ids", ids)
        device.set("draft_logprobs", logprobs)
        hidden = device.cuda.array(np.full((k, device.width), 7, np.uint16))
        device.kernels.tree_grow(shape, depth, device.cuda.array(outputs), hidden)
        rows = device.rows(DRAFT_ROW, k)
        assert rows == running.frontier_rows(growth.frontier, depth, offset)
        np.testing.assert_array_equal(device.cuda.numpy(hidden), outputs[growth.frontier.parent_rows])
        ids, logprobs = drafted(rng, k, k, has_ties)
        unplaced = [row == PADDING for row in rows]
        logprobs[unplaced] = -np.inf
        num_padding += sum(unplaced)
        outputs = rng.integers(0, 2**16, (k, device.width), np.uint16)
        growth.grow(ids, logprobs)
    device.set("draft_ids", ids)
    device.set("draft_logprobs", logprobs)
    device.kernels.tree_finish(shape)
    nodes, tree = growth.nodes(running.tokens[-1]), device.tree()
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(tree[name][: shape.tree_size], getattr(nodes, name), name)
    assert device.rows(TARGET_ROW, shape.tree_size) == running.node_rows(nodes)
    return num_padding + sum(row == PADDING for row in running.node_rows(nodes))


@pytest.mark.parametrize("has_ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_grows_as_the_definition_says(cuda: Any, shape: TreeShape, has_ties: bool) -> None:
    device = TreeDevice(cuda, pdl=has_ties)
    running = Running(1, list(range(41)), capacity=device.max_context, max_context=device.max_context)
    device.hold(running)
    assert check_growth(device, shape, running, offset=1, has_ties=has_ties) == 0


@pytest.mark.parametrize("width", [8, 4096, 12288])
def test_rows_follow_their_parents_hidden_states(cuda: Any, width: int) -> None:
    device = TreeDevice(cuda, width=width)
    running = Running(0, [3, 4], capacity=device.max_context, max_context=device.max_context)
    device.hold(running)
    check_growth(device, TreeShape(3, 10, 20), running, offset=1, has_ties=False)


def test_the_rows_of_an_independent_model_stand_one_further(cuda: Any) -> None:
    device = TreeDevice(cuda, offset=0)
    running = Running(2, list(range(9)), capacity=device.max_context, max_context=device.max_context)
    device.hold(running)
    check_growth(device, TreeShape.chain(5), running, offset=0, has_ties=False)


@pytest.mark.parametrize(("capacity", "max_context"), [(128, 320), (320, 104), (128, 130), (101, 320)])
def test_nodes_without_room_are_padding(cuda: Any, capacity: int, max_context: int) -> None:
    device = TreeDevice(cuda, max_context=max_context)
    running = Running(0, list(range(101)), capacity=capacity, max_context=max_context)
    device.hold(running)
    assert check_growth(device, TreeShape(5, 8, 64), running, offset=1, has_ties=False) > 0


def test_nothing_grows_in_a_finished_sequence(cuda: Any) -> None:
    device = TreeDevice(cuda)
    running = Running(0, [1, 2, 3], capacity=320, max_context=320, finished=True)
    device.hold(running)
    assert check_growth(device, TreeShape(), running, offset=1, has_ties=False) == 10 + 12
