"""masked_tree_sampling.cu: it tells the host the tree, and each node's token is the one that plain decoding samples
under the node's mask."""

from __future__ import annotations

from threading import Timer
from typing import Any

import numpy as np
import pytest
from kernels.test_tree_sampling import PADDING, SAMPLINGS, SHAPE, Plain, path_to, prepared
from tree_device import VOCAB, TreeDevice

from cpmrt.config import Sampling
from cpmrt.cuda.step import structs as ss
from cpmrt.cuda.step.masks import MaskedTree, TreeRing
from cpmrt.executor import TreeMasks
from cpmrt.reference.sampling import masked, token_logprobs

pytestmark = pytest.mark.gpu


@pytest.fixture
def ring(cuda: Any) -> Any:
    ring = TreeRing(VOCAB)
    yield ring
    cuda.sync()
    ring.close()


def number_of(device: TreeDevice) -> int:
    return int(device.get("step_context").view(ss.STEP_CONTEXT)[0]["next_entry"]) + 1


def masks_of(nodes: Any, rng: np.random.Generator) -> dict[tuple[int, ...], bytes | None]:
    """Return masks of about two thirds of the nodes, by their paths: any token, a few, some or most tokens. A node
    without a mask is cut, and so are all nodes behind it."""
    found: dict[tuple[int, ...], bytes | None] = {}
    for node in range(64):
        path = tuple(path_to(nodes, node))
        if node and (rng.random() < 0.33 or path[:-1] not in found):
            continue
        allowed = rng.random(VOCAB) < (0.05, 0.3, 0.95)[node % 3]
        allowed[int(rng.integers(VOCAB))] = True
        found[path] = None if node % 5 == 4 else np.packbits(allowed, bitorder="little").tobytes()
    return found


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_node_samples_under_its_mask(cuda: Any, ring: TreeRing, sampling: Sampling, portable: bool) -> None:
    device, rng = TreeDevice(cuda, portable=portable), np.random.default_rng(7)
    counts, nodes, logits = prepared(device, sampling, rng)
    bits, number = masks_of(nodes, rng), number_of(device)
    device.kernels.report_tree(SHAPE, ring)
    cuda.sync()
    assert ring.nodes(number, 64) == (nodes.tokens.tolist(), nodes.parents.tolist())
    assert not MaskedTree(ring, number, 64, TreeMasks(bits))(), "the tree is there"
    states_before = device.get("slot_states")
    device.kernels.sample_masked_tree(cuda.array(logits), ring)
    tree = device.tree()
    plain, own = Plain(device, portable), states_before.view(ss.SLOT_STATE)[1]
    entries = device.get("tree_logprobs").view(ss.TOKEN_LOGPROBS)
    num_cut = 0
    for node in range(64):
        path = path_to(nodes, node)
        if node == PADDING:
            assert tree["sampled"][node] == -5
        elif tuple(path) not in bits:
            assert tree["tokens"][node] == -1, "no sampled token equals it"
            assert tree["sampled"][node].astype(np.uint32) == ss.CUT_NODE
            num_cut += 1
        else:
            token, _ = plain.sample(own, counts[1], path, masked(logits[node], bits[tuple(path)]))
            assert tree["sampled"][node] == token
            if sampling.logprobs:
                raw = token_logprobs(logits[node], token, sampling.logprobs)
                assert entries[node]["logprob"] == pytest.approx(raw.logprob, abs=1e-3)
    assert 5 < num_cut < 60
    np.testing.assert_array_equal(device.get("slot_states"), states_before)
    np.testing.assert_array_equal(device.get("token_counts"), counts)


def test_nodes_wait_for_masks_that_come_late(cuda: Any, ring: TreeRing) -> None:
    device, rng = TreeDevice(cuda), np.random.default_rng(7)
    _, nodes, logits = prepared(device, Sampling(), rng)
    only = bytes(5) + b"\x02"
    masks, number = TreeMasks({(): only}), number_of(device)
    tree = MaskedTree(ring, number, 64, masks)
    device.kernels.report_tree(SHAPE, ring)
    Timer(0.2, tree).start()
    device.kernels.sample_masked_tree(cuda.array(logits), ring)
    found = device.tree()
    assert found["sampled"][0] == 41 and (found["tokens"][1:64] == -1).sum() == 62, "all but the root and the padding"


def test_a_tree_that_is_let_go_samples_anything(cuda: Any, ring: TreeRing) -> None:
    device, rng = TreeDevice(cuda), np.random.default_rng(7)
    _, nodes, logits = prepared(device, Sampling(), rng)
    masks = TreeMasks(find=lambda paths: {})
    tree = MaskedTree(ring, number_of(device), 64, masks)
    masks.let_go()
    device.kernels.sample_masked_tree(cuda.array(logits), ring)
    assert device.tree()["sampled"][0] == int(np.argmax(logits[0])) and not tree()


@pytest.mark.parametrize(("bits", "bad_logit", "code"), [
    (bytes(VOCAB // 8), 1.0, ss.NOTHING_ALLOWED), (b"\x01", -np.inf, ss.NOTHING_ALLOWED),
    (b"\x02", np.nan, ss.NON_FINITE), (None, np.inf, ss.NON_FINITE),
])  # fmt: skip
def test_why_a_node_has_no_token(cuda: Any, ring: TreeRing, bits: bytes | None, bad_logit: float, code: int) -> None:
    device, rng = TreeDevice(cuda), np.random.default_rng(7)
    _, nodes, logits = prepared(device, Sampling(), rng)
    logits[0, 0] = bad_logit
    tree = MaskedTree(ring, number_of(device), 64, TreeMasks({(): bits}))
    device.kernels.report_tree(SHAPE, ring)
    cuda.sync()
    assert not tree()
    device.kernels.sample_masked_tree(cuda.array(logits), ring)
    sampled = device.tree()["sampled"].astype(np.uint32)
    assert sampled[0] == code and (np.delete(sampled, [0, PADDING]) == ss.CUT_NODE).all()
