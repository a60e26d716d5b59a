"""The kernels of a speculative step with a tree for each of several sequences: each tree has the results that it has
alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.test_accept import CACHES, likely, random_tree
from kernels.test_block import MASK_TOKEN, BlockDevice
from kernels.test_draft_tree import drafted
from speculation_oracle import PADDING, Running, move_rows
from tree_device import DRAFT_ROW, TARGET_ROW, VOCAB, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.config.speculation import LONGEST_MATCH
from cpmrt.cuda.step import structs as ss
from cpmrt.dtypes import DType, from_float32
from cpmrt.reference.draft_block import choose_block
from cpmrt.reference.draft_tree import TreeGrowth, chain_nodes, lookup

pytestmark = pytest.mark.gpu
TREES = 3
SHAPES = (TreeShape(2, 10, 12), TreeShape(4, 5, 20), TreeShape(1, 8, 8), TreeShape.chain(5))


def sequences(*, vocab: int = VOCAB, width: int = 64) -> list[Running]:
    """Return three sequences, not in the order of slots: one with room for everything, one at the end of its pages, one
    that has finished."""
    rng, made = np.random.default_rng(7), []
    cases = ((2, 70, 320, 3, False), (0, 60, 64, 5, False), (1, 9, 320, 2, True))
    for slot, length, capacity, count, finished in cases:
        pending = rng.integers(0, 2**16, (count, width), np.uint16)
        tokens = rng.integers(0, vocab, length).tolist()
        made.append(Running(slot, tokens, capacity, 320, pending=pending, finished=finished))
    return made


def held(device: TreeDevice, running: list[Running], **sampling: Any) -> list[Running]:
    for one in running:
        device.hold(one, **sampling)
    return running


def assert_nodes(device: TreeDevice, index: int, running: Running, nodes: Any, shape: TreeShape) -> None:
    """Assert that tree `index` and its rows of the target are those of `nodes`."""
    tree, count = device.tree(index), len(nodes.tokens)
    for name in ("tokens", "parents", "depths"):
        np.testing.assert_array_equal(tree[name][:count], getattr(nodes, name), name)
    first = index * shape.num_nodes
    assert device.rows(TARGET_ROW, first + count)[first:] == running.node_rows(nodes)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("width", [64, 4096])
def test_rows_that_wait_lie_side_by_side(cuda: Any, width: int, count: int, pdl: bool) -> None:
    device, num_rows = TreeDevice(cuda, width=width, pdl=pdl), 4
    running = held(device, sequences(width=width))[:count]
    hidden = cuda.array(np.full((num_rows * TREES, width), 0x1234, np.uint16))
    device.begin_several(running, TREES, num_rows, hidden)
    rows, got = device.rows(DRAFT_ROW[:4], num_rows * TREES), cuda.numpy(hidden)
    for index in range(TREES):
        if index >= count:
            assert device.tree(index)["slot"] == -1 and set(rows[index::TREES]) == {(0, 0, -1, 0)}
            continue
        one, waiting = running[index], running[index].pending
        assert rows[index::TREES] == one.pending_rows(num_rows, 1)
        used = 0 if one.finished else min(len(waiting), num_rows)
        np.testing.assert_array_equal(got[index::TREES][num_rows - used :], waiting[len(waiting) - used :])
        assert (got[index::TREES][: num_rows - used] == 0x1234).all()
        tree = device.tree(index)
        assert (tree["slot"], tree["position"]) == (-1 if one.finished else one.slot, one.position)
        assert (tree["sequence"], tree["num_steps"]) == (device.number, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_grow_beside_each_other(cuda: Any, shape: TreeShape) -> None:
    device, k = TreeDevice(cuda, pdl=True), shape.top_k
    running, rng = held(device, sequences()), np.random.default_rng(shape.tree_size)
    growths, unplaced = [TreeGrowth(shape) for _ in running], [False] * TREES
    device.begin_several(running, TREES)
    for depth in range(shape.num_passes):
        num_rows = k if depth else 1
        passes = [drafted(rng, num_rows, k, False) for _ in running]
        for (_, logprobs), lost in zip(passes, unplaced, strict=True):
            logprobs[np.array(lost)] = -np.inf
        device.set("draft_ids", np.concatenate([ids for ids, _ in passes]))
        device.set("draft_logprobs", np.concatenate([logprobs for _, logprobs in passes]))
        for growth, (ids, logprobs) in zip(growths, passes, strict=True):
            growth.grow(ids, logprobs)
        if depth + 1 == shape.num_passes:
            break
        outputs = rng.integers(0, 2**16, (TREES, num_rows, device.width), np.uint16)
        hidden = cuda.array(np.zeros((TREES * k, device.width), np.uint16))
        device.kernels.tree_grow(shape, depth + 1, cuda.array(outputs.reshape(-1, device.width)), hidden, TREES)
        rows, got = device.rows(DRAFT_ROW, TREES * k), cuda.numpy(hidden).reshape(TREES, k, -1)
        for index, (one, growth) in enumerate(zip(running, growths, strict=True)):
            own = rows[index * k : (index + 1) * k]
            assert own == one.frontier_rows(growth.frontier, depth + 1, 1)
            np.testing.assert_array_equal(got[index], outputs[index][growth.frontier.parent_rows])
            unplaced[index] = [row == PADDING for row in own]
    device.kernels.tree_finish(shape, TREES)
    for index, (one, growth) in enumerate(zip(running, growths, strict=True)):
        assert_nodes(device, index, one, growth.nodes(one.tokens[-1]), shape)


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("length", [3, 15])
def test_each_looks_up_in_its_own_text(cuda: Any, length: int, portable: bool) -> None:
    device = TreeDevice(cuda, portable=portable)
    running = held(device, sequences(vocab=3)[:2] + sequences()[2:])
    chain, beside = TreeShape.chain(9), TreeShape(9, 1, 10, length)
    device.begin_several(running, TREES)
    device.kernels.lookup(chain, TREES)
    before = [[] if one.finished else lookup(one.tokens, 9) for one in running]
    for index, (one, found) in enumerate(zip(running, before, strict=True)):
        assert_nodes(device, index, one, chain_nodes(one.tokens[-1], found, 10), chain)
    device.kernels.lookup_instead(beside, TREES)
    for index, one in enumerate(running):
        found = [] if one.finished else lookup(one.tokens, length, LONGEST_MATCH)
        if found:  # otherwise the tree keeps its nodes, in rows of another stride
            assert_nodes(device, index, one, chain_nodes(one.tokens[-1], found, beside.num_nodes), beside)
    assert any(lookup(one.tokens, length, LONGEST_MATCH) for one in running)


@pytest.mark.parametrize("shape", [*SHAPES, TreeShape(3, 4, 9, 14)], ids=str)
@pytest.mark.parametrize("pdl", [False, True])
def test_every_path_is_accepted(cuda: Any, shape: TreeShape, pdl: bool) -> None:
    device, rng, longest = TreeDevice(cuda, pdl=pdl, moved=CACHES), np.random.default_rng(3), 0
    running, num_nodes = held(device, sequences(), num_logprobs=1), shape.num_nodes
    for _ in range(4):
        before = {name: device.get(name) for name in CACHES}
        device.begin_several(running, TREES)
        trees = [random_tree(rng, shape, one.tokens[-1]) for one in running]
        told = [likely(rng, nodes, 0.9) for nodes in trees]
        for index, (nodes, sampled) in enumerate(zip(trees, told, strict=True)):
            nodes_of = {name: np.full(num_nodes, -1, np.int32) for name in ("tokens", "parents", "depths", "sampled")}
            for name, values in nodes_of.items():
                values[: shape.tree_size] = sampled if name == "sampled" else getattr(nodes, name)
            nodes_of["depths"][shape.tree_size :] = 0
            device.set_tree(index, **nodes_of)
        logprobs = rng.integers(0, 2**8, (64, ss.TOKEN_LOGPROBS.itemsize), np.uint8)
        device.set("tree_logprobs", logprobs)
        hidden = rng.integers(0, 2**16, (TREES, num_nodes, device.width), np.uint16)
        device.kernels.accept(shape, cuda.array(hidden.reshape(-1, device.width)), None, TREES)
        words, entries = device.words(TREES * shape.max_emitted), device.record()["logprobs"]
        assert words is not None
        for index, one in enumerate(running):
            root, first = one.position, index * shape.max_emitted
            path = one.accept(trees[index], told[index], hidden[index])
            longest = max(longest, len(path))
            emitted = [told[index][node] for node in path]
            assert words[first : first + shape.max_emitted] == emitted + [ss.NO_TOKEN] * (shape.max_emitted - len(path))
            for name in CACHES:
                before[name] = move_rows(before[name], device.tables[one.slot], root, path)
            state = device.get("slot_states").view(ss.SLOT_STATE)[one.slot]
            assert (state["position"], state["last_token"]) == (one.position, one.tokens[-1])
            assert (state["num_generated"], state["finished"]) == (one.num_generated, one.finished)
            if path:
                kept = np.ascontiguousarray(entries[first : first + len(path)]).view(np.uint8).reshape(len(path), -1)
                np.testing.assert_array_equal(kept, logprobs[index * num_nodes :][path])
                np.testing.assert_array_equal(device.get("carry_hidden")[one.slot, : len(path)], hidden[index][path])
        for name in CACHES:
            np.testing.assert_array_equal(device.get(name), before[name])
        context = device.get("step_context").view(ss.STEP_CONTEXT)[0]
        assert (context["next_entry"], context["sequence"]) == (device.number, device.number)
    assert longest > 1


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
def test_nodes_of_several_trees_sample_what_they_sample_alone(cuda: Any, portable: bool) -> None:
    device, rng, shape = TreeDevice(cuda, portable=portable), np.random.default_rng(5), TreeShape(3, 4, 20)
    sampling = {"temperature": 0.9, "frequency_penalty": 0.8, "repetition_penalty": 1, "top_p": 1, "log_min_p": -np.inf}
    running = held(device, sequences()[:2], num_logprobs=2, seed=9, **sampling)
    trees = [random_tree(rng, shape, one.tokens[-1]) for one in running]
    logits = (rng.standard_normal((2, 20, VOCAB)) * 2).astype(np.float32)
    found = []
    for together in (False, True):
        groups = [[0, 1]] if together else [[0], [1]]
        for group in groups:
            device.begin_several([running[number] for number in group], len(group))
            for index, number in enumerate(group):
                nodes = trees[number]
                device.set_tree(index, tokens=nodes.tokens, parents=nodes.parents, depths=nodes.depths)
            device.set("slots", np.repeat([running[number].slot for number in group], 20).astype(np.int32))
            device.kernels.sample_tree(cuda.array(logits[group].reshape(-1, VOCAB)), len(group))
            entries = device.get("tree_logprobs").reshape(64, -1)[: 20 * len(group), :16]
            sampled = [device.tree(index)["sampled"][:20].tolist() for index in range(len(group))]
            found.append((sampled, entries.tobytes()))
    assert found[2][0] == found[0][0] + found[1][0] and found[2][1] == found[0][1] + found[1][1]


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
def test_blocks_of_several_sequences(cuda: Any, portable: bool) -> None:
    own = [BlockDevice(cuda, seed=seed, portable=portable, num_trees=TREES) for seed in range(TREES)]
    device, rows, shape = own[0].tree, own[0].rows, TreeShape(5, 1, 6, 8)
    running = held(device, sequences(vocab=90))
    device.begin_several(running, TREES)
    own[0].kernels.block_begin(TREES)
    names = tuple(f"draft_{name}" for name in ("token_ids", "positions", "slots", "reach"))
    got, fits = device.rows(names, TREES * rows), []
    for index, one in enumerate(running):
        end = min(one.capacity, one.max_context)
        there = [one.position + row < end and not one.finished for row in range(rows)]
        reach = min(one.position + rows, end) - 1
        tokens = [one.tokens[-1], *[MASK_TOKEN] * (rows - 1)]
        assert got[index * rows : (index + 1) * rows] == [
            (token, one.position + row, one.slot, reach) if there[row] else (0, 0, -1, 0)
            for row, token in enumerate(tokens)
        ]  # fmt: skip
        fits.append(sum(there))
    logits, states = (np.concatenate([getattr(one, name) for one in own]) for name in ("logits", "states"))
    words = from_float32(states, DType.BFLOAT16)
    own[0].kernels.markov_chain(shape, cuda.array(logits), cuda.array(words), num_trees=TREES)
    for index, (one, room) in enumerate(zip(running, fits, strict=True)):
        logits, states = own[index].logits, own[index].states
        tokens = choose_block(logits, states, one.tokens[-1], min(5, room), own[0].markov, 0.0)
        assert_nodes(device, index, one, chain_nodes(one.tokens[-1], tokens, 6), shape)
