"""accept.cu against reference/draft_tree.py and plain NumPy: accepted paths, stop tokens, limits, and all state that
accepting changes."""

from __future__ import annotations

from math import floor
from typing import Any

import numpy as np
import pytest
from speculation_oracle import Running, move_rows
from tree_device import VOCAB, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.cuda.step import structs as ss
from cpmrt.reference.draft_tree import Nodes, TreeGrowth, chain_nodes

pytestmark = pytest.mark.gpu
WIDE = TreeShape(5, 8, 64)

CACHES = ("k_pages", "v_pages", "nope_pages")


def random_tree(rng: np.random.Generator, shape: TreeShape, root: int) -> Nodes:
    growth, k = TreeGrowth(shape), shape.top_k
    for level in range(shape.num_passes):
        rows = 1 if level == 0 else k
        ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(rows)]).astype(np.int32)
        logprobs = -np.sort(rng.exponential(1, (rows, k)).astype(np.float32), axis=1)
        if level:
            growth.grow(ids, logprobs)
        else:
            growth.grow(ids[:1], logprobs[:1])
    return growth.nodes(root)


def likely(rng: np.random.Generator, nodes: Nodes, share: float) -> list[int]:
    """Return a sampled token for each node: with probability `share` the token of one of the node's children."""
    sampled = rng.integers(0, VOCAB, len(nodes.tokens))
    for node in range(len(nodes.tokens)):
        children = np.flatnonzero(nodes.parents == node)
        if len(children) and rng.random() < share:
            sampled[node] = nodes.tokens[rng.choice(children)]
    return sampled.tolist()


class Stepper:
    """Runs accept steps of one sequence on the device and checks each against the oracle."""

    def __init__(self, device: TreeDevice, running: Running, shape: TreeShape, num_logprobs: int = 0):
        self.device, self.running, self.shape, self.num_logprobs = device, running, shape, num_logprobs
        device.hold(running, num_logprobs=num_logprobs)
        self.counts = device.get("token_counts")
        self.carry = device.get("carry_hidden")

    def step(self, nodes: Nodes, sampled: list[int], rng: np.random.Generator, simulate: float = 0.0) -> Any:
        """Write what the kernels before accept leave in the tree, run accept, and return the accepted path."""
        device, shape = self.device, self.shape
        before = {name: device.get(name) for name in CACHES if name in device.arrays}
        device.begin(self.running)
        device.set_tree(
            tokens=nodes.tokens, parents=nodes.parents, depths=nodes.depths, sampled=np.array(sampled, np.int32)
        )
        logprobs = rng.integers(0, 2**8, (64, ss.TOKEN_LOGPROBS.itemsize), np.uint8)
        device.set("tree_logprobs", logprobs)
        hidden = rng.integers(0, 2**16, (shape.tree_size, device.width), np.uint16)
        device.kernels.accept(shape, device.cuda.array(hidden), simulate)
        self.before, self.hidden, self.logprobs = before, hidden, logprobs
        tree = device.tree()
        return tree["path"][: tree["path_length"]].tolist()

    def check(self, path: list[int], sampled: list[int], root: int) -> None:
        """Check everything that the kernel writes; the oracle `running` must have accepted `path` already."""
        device, running, length = self.device, self.running, len(path)
        emitted = [sampled[node] for node in path]
        assert device.words(self.shape.max_emitted) == emitted + [ss.NO_TOKEN] * (self.shape.max_emitted - length)
        if self.num_logprobs and length:
            entries = np.ascontiguousarray(device.record()["logprobs"][:length]).view(np.uint8)
            np.testing.assert_array_equal(entries.reshape(length, -1), self.logprobs[path])
        for name, pages in self.before.items():
            moved = move_rows(pages, device.tables[running.slot], root, path)
            np.testing.assert_array_equal(device.get(name), moved)
        state = device.get("slot_states").view(ss.SLOT_STATE)[running.slot]
        assert state["position"] == running.position and state["last_token"] == running.tokens[-1]
        assert (state["num_generated"], state["finished"]) == (running.num_generated, running.finished)
        known = min(len(running.tokens), device.max_context)
        np.testing.assert_array_equal(device.get("history")[running.slot, :known], running.tokens[:known])
        for token in emitted:
            self.counts[running.slot, token] = (self.counts[running.slot, token] + 1) | ss.SEEN
        np.testing.assert_array_equal(device.get("token_counts"), self.counts)
        if length:
            self.carry[running.slot, :length] = self.hidden[path]
            assert device.get("carry_counts")[running.slot] == length
        np.testing.assert_array_equal(device.get("carry_hidden"), self.carry)
        context = device.get("step_context").view(ss.STEP_CONTEXT)[0]
        assert (context["next_entry"], context["sequence"]) == (device.number, device.number)


def run(stepper: Stepper, rng: np.random.Generator, num_steps: int, share: float = 0.85) -> list[int]:
    """Run `num_steps` checked steps with random trees and return the lengths of the accepted paths."""
    lengths, running = [], stepper.running
    for _ in range(num_steps):
        root = running.position
        nodes = random_tree(rng, stepper.shape, running.tokens[-1])
        sampled = likely(rng, nodes, share)
        got = stepper.step(nodes, sampled, rng)
        path = running.accept(nodes, sampled, stepper.hidden)
        assert got == path
        stepper.check(path, sampled, root)
        lengths.append(len(path))
    return lengths


@pytest.mark.parametrize("moved", [CACHES[:1], CACHES[:2], CACHES], ids=len)
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("shape", [TreeShape(), WIDE, TreeShape(1, 32, 33), TreeShape(2, 31, 64)], ids=str)
def test_the_longest_path_is_accepted(cuda: Any, shape: TreeShape, pdl: bool, moved: tuple[str, ...]) -> None:
    rng = np.random.default_rng(shape.tree_size)
    running = Running(1, rng.integers(0, VOCAB, 50).tolist(), capacity=320, max_context=320)
    device = TreeDevice(cuda, pdl=pdl, moved=moved)
    lengths = run(Stepper(device, running, shape), rng, 12)
    assert max(lengths) > 1 and sum(lengths) > 14


@pytest.mark.parametrize("width", [4096, 12288])
def test_hidden_states_as_wide_as_a_model_has_them(cuda: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    running = Running(0, [1, 2, 3], capacity=320, max_context=320)
    assert max(run(Stepper(TreeDevice(cuda, width=width), running, TreeShape(4, 10, 32)), rng, 3)) > 1


def test_a_whole_chain(cuda: Any) -> None:
    rng, shape = np.random.default_rng(4), TreeShape.chain(32)
    running = Running(2, list(range(60)), capacity=320, max_context=320)
    stepper, drafted = Stepper(TreeDevice(cuda), running, shape, num_logprobs=3), rng.integers(0, VOCAB, 33).tolist()
    nodes = chain_nodes(59, drafted[:32], 33)
    assert stepper.step(nodes, drafted, rng) == list(range(33))
    stepper.check(running.accept(nodes, drafted, stepper.hidden), drafted, 59)


def test_a_chain_that_was_not_found_gives_one_token(cuda: Any) -> None:
    rng, shape = np.random.default_rng(5), TreeShape.chain(4)
    running = Running(2, [0, 0], capacity=320, max_context=320)
    stepper, nodes = Stepper(TreeDevice(cuda), running, shape), chain_nodes(0, [], 5)
    assert stepper.step(nodes, [0] * 5, rng) == [0]
    stepper.check(running.accept(nodes, [0] * 5, stepper.hidden), [0] * 5, 1)


def test_a_stop_token_ends_inside_the_path(cuda: Any) -> None:
    rng, shape, ends = np.random.default_rng(6), TreeShape.chain(6), []
    for stop in range(6):
        running = Running(0, [1, 2], capacity=320, max_context=320, stop_token_ids=(90, 10 + stop))
        stepper, drafted = Stepper(TreeDevice(cuda), running, shape, num_logprobs=1), [*range(10, 17)]
        nodes = chain_nodes(2, drafted[:6], 7)
        ends.append(len(stepper.step(nodes, drafted, rng)))
        stepper.check(running.accept(nodes, drafted, stepper.hidden), drafted, 1)
        assert running.finished
        stepper.step(nodes, drafted, rng)  # a step that the host sent before it knew that the sequence had finished
        stepper.check([], drafted, running.position)
    assert ends == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("code", [ss.NON_FINITE, ss.NO_MASK, ss.CUT_NODE, ss.NOTHING_ALLOWED])
@pytest.mark.parametrize("node", [0, 1, 4, 6])
def test_a_node_without_a_token_ends_the_path_and_says_why(cuda: Any, node: int, code: int) -> None:
    rng, shape = np.random.default_rng(11), TreeShape.chain(6)
    running = Running(0, [1, 2], capacity=320, max_context=320)
    stepper, drafted = Stepper(TreeDevice(cuda), running, shape), [*range(10, 17)]
    sampled = drafted[:node] + [int(np.uint32(code).astype(np.int32))] + drafted[node + 1 :]
    assert stepper.step(chain_nodes(2, drafted[:6], 7), sampled, rng) == list(range(node))
    assert stepper.device.words(7) == [*drafted[:node], code, *[ss.NO_TOKEN] * (6 - node)]
    assert stepper.device.get("slot_states").view(ss.SLOT_STATE)[0]["finished"]


@pytest.mark.parametrize("left", [1, 2, 6, 7, 8])
def test_the_limit_ends_inside_the_path(cuda: Any, left: int) -> None:
    rng, shape = np.random.default_rng(7), TreeShape.chain(6)
    running = Running(0, [1, 2], capacity=320, max_context=320, num_generated=5, max_new_tokens=5 + left)
    stepper, drafted = Stepper(TreeDevice(cuda), running, shape), [*range(10, 17)]
    nodes = chain_nodes(2, drafted[:6], 7)
    assert len(stepper.step(nodes, drafted, rng)) == min(left, 7)
    stepper.check(running.accept(nodes, drafted, stepper.hidden), drafted, 1)
    assert running.finished == (left <= 7)


@pytest.mark.parametrize(("capacity", "max_context"), [(64, 320), (320, 61), (320, 58), (58, 320)])
def test_nodes_without_room_are_not_accepted(cuda: Any, capacity: int, max_context: int) -> None:
    rng, shape = np.random.default_rng(8), TreeShape.chain(6)
    running = Running(1, list(range(58)), capacity=capacity, max_context=max_context)
    stepper, drafted = Stepper(TreeDevice(cuda, max_context=max_context), running, shape), [*range(10, 17)]
    nodes = chain_nodes(57, drafted[:6], 7)
    assert len(stepper.step(nodes, drafted, rng)) == min(capacity, max_context) - 57
    stepper.check(running.accept(nodes, drafted, stepper.hidden), drafted, 57)


@pytest.mark.parametrize("mean", [1.0, 2.5, 3.25, 50.0])
def test_simulated_lengths_have_their_mean(cuda: Any, mean: float) -> None:
    rng, shape = np.random.default_rng(9), TreeShape(4, 10, 32)
    running = Running(1, [5, 6], capacity=320, max_context=320)
    stepper = Stepper(TreeDevice(cuda), running, shape)
    for step in range(8):
        root, nodes = running.position, random_tree(rng, shape, running.tokens[-1])
        sampled = rng.integers(0, VOCAB, 32).tolist()
        deepest = int(np.argmax(nodes.depths))
        line = [node for node in range(32) if int(nodes.masks[deepest]) >> node & 1]
        wanted = line[: max(1, floor((step + 1) * mean) - floor(step * mean))]
        told = as_drafted(nodes, wanted, sampled)
        path = running.take(wanted, told, np.zeros((32, 64), np.uint16))
        assert stepper.step(nodes, sampled, rng, simulate=mean) == path
        stepper.check(path, told, root)


def as_drafted(nodes: Nodes, line: list[int], sampled: list[int]) -> list[int]:
    """Return the nodes' sampled tokens after a simulated acceptance: on the path `line` each node but the last has the
    drafted token of the next node."""
    told = list(sampled)
    for node, after in zip(line, line[1:], strict=False):
        told[node] = int(nodes.tokens[after])
    return told


def test_a_simulated_path_leaves_out_what_a_form_has_cut(cuda: Any) -> None:
    """A simulated path ends before the first node that a form has cut: the sampling kernel leaves token -1 there and in
    all nodes behind it."""
    rng, shape = np.random.default_rng(10), TreeShape.chain(6)
    running = Running(1, [5, 6], capacity=320, max_context=320)
    stepper = Stepper(TreeDevice(cuda), running, shape)
    for num_left in (7, 4, 1, 2):
        root, nodes = running.position, chain_nodes(running.tokens[-1], [*range(20, 26)], 7)
        nodes.tokens[num_left:] = -1
        sampled, line = rng.integers(0, VOCAB, 7).tolist(), list(range(min(num_left, 5)))
        told = as_drafted(nodes, line, sampled)
        path = running.take(line, told, np.zeros((7, 64), np.uint16))
        assert stepper.step(nodes, sampled, rng, simulate=5.0) == path
        stepper.check(path, told, root)
