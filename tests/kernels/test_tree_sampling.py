"""tree_sampling.cu: a node's token is the one that plain decoding samples behind the node's path, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speculation_oracle import Running
from tree_device import VOCAB, TreeDevice

from cpmrt.config import Sampling, TreeShape
from cpmrt.cuda.step import structs as ss
from cpmrt.cuda.step.commands import slot_state
from cpmrt.dtypes import DType
from cpmrt.executor import Admit
from cpmrt.reference.draft_tree import Nodes, TreeGrowth

pytestmark = pytest.mark.gpu
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, logit_bias=((3, 4.0), (70, -2.0))),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, frequency_penalty=1.3, logprobs=3),
    Sampling(temperature=1.2, top_p=0.7, repetition_penalty=0.8, logprobs=20),
)
SHAPE = TreeShape(5, 8, 64)


def deep_tree(rng: np.random.Generator) -> Nodes:
    """Return a deep tree with few different tokens, so that paths repeat some."""
    growth = TreeGrowth(SHAPE)
    for level in range(SHAPE.num_passes):
        rows = 1 if level == 0 else SHAPE.top_k
        ids = np.stack([rng.permutation(9)[:8] for _ in range(rows)]).astype(np.int32)
        logprobs = -np.sort(rng.exponential(0.2, (rows, 8)).astype(np.float32), axis=1)
        if level:
            growth.grow(ids, logprobs)
        else:
            growth.grow(ids[:1], logprobs[:1])
    return growth.nodes(4)


class Plain:
    """The plain sampling kernel on one row of a slot whose newest generated tokens are a path."""

    def __init__(self, device: TreeDevice, portable: bool):
        self.device, self.grid = device, 1 if portable or device.cuda.device.capability < 90 else 8
        self.kernel = device.cuda.kernel("sample", DType.BFLOAT16, VOCAB=VOCAB, PORTABLE=int(portable))

    def sample(self, state: Any, counts: Any, path: list[int], logits: Any) -> tuple[int, bytes]:
        cuda, words, own = self.device.cuda, counts.copy(), state.copy()
        for token in path:
            words[token] = ss.SEEN | (words[token] + 1)
        own["position"] += len(path) + 1
        results = cuda.array(np.zeros(ss.RING_ENTRIES * ss.RESULT_RECORD.itemsize, np.uint8))
        context = np.ones(1, ss.STEP_CONTEXT)
        context["next_entry"] = context["sequence"] = 1
        self.kernel(
            (self.grid, 1), 512, results, cuda.array(np.atleast_1d(own).view(np.uint8)), cuda.array(words),
            cuda.array(logits), cuda.array(np.zeros(1, np.int32)), cuda.array(context.view(np.uint8)),
        )  # fmt: skip
        record = np.ascontiguousarray(cuda.numpy(results)).view(ss.RESULT_RECORD)[0]
        return int(record["words"][0]) & ss.NO_TOKEN, record["logprobs"][0].tobytes()


@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_node_samples_what_plain_decoding_samples(cuda: Any, sampling: Sampling, portable: bool) -> None:
    device, rng = TreeDevice(cuda, portable=portable), np.random.default_rng(2)
    counts, nodes, logits = prepared(device, sampling, rng)
    states_before = device.get("slot_states")
    device.kernels.sample_tree(cuda.array(logits))
    sampled = device.tree()["sampled"]
    entries = device.get("tree_logprobs").reshape(64, -1)
    plain, own = Plain(device, portable), states_before.view(ss.SLOT_STATE)[1]
    assert nodes.depths.max() == 5
    for node in range(64):
        if node == PADDING:
            assert sampled[node] == -5
            continue
        token, logprobs = plain.sample(own, counts[1], path_to(nodes, node), logits[node])
        assert sampled[node] == token
        if sampling.logprobs:
            used = 8 + 4 * sampling.logprobs
            assert entries[node].tobytes()[:used] == logprobs[:used]
    np.testing.assert_array_equal(device.get("slot_states"), states_before)
    np.testing.assert_array_equal(device.get("token_counts"), counts)


def path_to(nodes: Nodes, node: int) -> list[int]:
    """Return the tokens from the root's child to the node."""
    return [int(nodes.tokens[other]) for other in range(1, 64) if int(nodes.masks[node]) >> other & 1]


PADDING = 7
"""The node whose row is padding: it has no slot."""


def prepared(device: TreeDevice, sampling: Sampling, rng: np.random.Generator) -> tuple[Any, Nodes, Any]:
    """Put a sequence with a deep tree into slot 1 and return the token counts, the nodes, and their logits."""
    running = Running(1, rng.integers(0, VOCAB, 30).tolist(), capacity=320, max_context=320)
    state = slot_state(Admit(1, sampling, 12345, 100, ()))
    counts = np.zeros((3, VOCAB), np.uint32)
    for token in running.tokens:
        counts[1, token] |= ss.SEEN
    counts[1, [5, 9, 60]] += 2
    counts[1, [token for token, _ in sampling.logit_bias]] |= ss.BIASED
    names = [name for name in ss.SLOT_STATE.names if name not in ("position", "last_token", "finished", "stop_ids")]
    device.hold(running, **{name: state[name] for name in names if name != "num_stop_ids"})
    device.set("token_counts", counts)
    device.begin(running)
    nodes = deep_tree(rng)
    device.set_tree(tokens=nodes.tokens, parents=nodes.parents, depths=nodes.depths)
    slots = np.full(64, 1, np.int32)
    slots[PADDING] = -1
    device.set("slots", slots)
    logits = (rng.standard_normal((64, VOCAB)) * 2).astype(np.float32)
    device.set_tree(sampled=np.full(64, -5, np.int32))
    return counts, nodes, logits
