"""chain.cu: the rows that an inner draft has not seen, the chain that a small model drafts, and the target's rows for
it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tree_device import SLOTS, TARGET_ROW, TreeDevice

from cpmrt.config import TreeShape
from cpmrt.cuda.draft.inner import ChainKernels
from cpmrt.cuda.step import structs as ss
from cpmrt.reference.draft_tree import chain_nodes

pytestmark = pytest.mark.gpu

SLOT, POSITION, NUM_ROWS, CAPACITY = 2, 70, 9, 300
OWN_ROWS, SMALL_ROWS = ("draft_token_ids", "draft_positions", "draft_slots"), ("token_ids", "positions", "slots")


class ChainDevice:
    """`ChainKernels` of a small model, and a `TreeDevice` with the arrays of its target.

    With `width` 0 the inner draft reads no hidden states. The small model's last pass had `used` rows, the newest at
    POSITION; with slot -1 the sequence has finished.
    """

    def __init__(
        self, cuda: Any, *, used: int, width: int = 64, offset: int = 1, slot: int = SLOT, room: int = CAPACITY
    ):
        self.cuda, self.width = cuda, width
        self.tree = TreeDevice(cuda)
        self.tree.set_tree(slot=slot, position=POSITION, root_token=5, capacity=room, max_context=320)
        rng = np.random.default_rng(used)
        first = NUM_ROWS - used
        self.tokens = np.concatenate([np.zeros(first, np.int32), rng.integers(1, 90, used).astype(np.int32)])
        self.positions = np.where(np.arange(NUM_ROWS) < first, 0, POSITION + 1 - NUM_ROWS + np.arange(NUM_ROWS))
        self.slots = np.where(np.arange(NUM_ROWS) < first, -1, SLOT)
        self.hidden = rng.integers(0, 2**16, (NUM_ROWS + 1, max(width, 8)), np.uint16)
        self.carry = rng.integers(0, 2**16, (SLOTS, 64, max(width, 8)), np.uint16)
        host = dict(zip(SMALL_ROWS, (self.tokens, self.positions, self.slots), strict=True))
        host |= {name: np.full(NUM_ROWS, 0x55) for name in OWN_ROWS} | {"carry_counts": np.full(SLOTS, 4)}
        arrays = {name: values.astype(np.int32) for name, values in host.items()}
        if width:
            arrays |= {"hidden": self.hidden, "carry_hidden": self.carry, "carry_kept": np.zeros(width, np.uint16)}
        arrays["slot_states"] = np.full(SLOTS * ss.SLOT_STATE.itemsize, 1, np.uint8)
        self.inner = {name: cuda.array(values) for name, values in arrays.items()}
        self.kernels = ChainKernels(self.tree.kernels._launch, self.tree.arrays, self.inner, offset, NUM_ROWS)

    def get(self, name: str) -> Any:
        return np.ascontiguousarray(self.cuda.numpy(self.inner[name]))

    def state(self) -> Any:
        return self.get("slot_states").view(ss.SLOT_STATE)[SLOT]

    def draft(self, tokens: list[int], length: int) -> None:
        """Begin a chain with the first token, and write the others into history and state as the small model's steps
        would."""
        self.tree.set("draft_ids", tokens[:1])
        self.kernels.begin(NUM_ROWS, length)
        history, states = self.tree.get("history"), self.get("slot_states").view(ss.SLOT_STATE)
        history[SLOT, POSITION + 2 : POSITION + 1 + len(tokens)] = tokens[1:]
        states["num_generated"][SLOT] = len(tokens)
        self.tree.set("history", history)
        with self.cuda.stream:
            self.inner["slot_states"].set(states.view(np.uint8))
            self.inner["carry_hidden"].fill(7)
            self.inner["carry_counts"].fill(3)
        self.cuda.sync()


@pytest.mark.parametrize("width", [0, 64, 12288])
@pytest.mark.parametrize("used", [1, 2, NUM_ROWS])
@pytest.mark.parametrize("pending", [0, 1])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_the_inner_draft_gets_what_it_has_not_seen(cuda: Any, width: int, used: int, pending: int, length: int) -> None:
    """The inner draft's rows are those that it has not seen; with length 0 the newest row is left for the next pass."""
    device = ChainDevice(cuda, used=used, width=width, offset=int(width > 0))
    with cuda.stream:
        device.inner["carry_counts"].fill(pending)
    device.tree.set("draft_ids", [17])
    device.kernels.begin(NUM_ROWS, length)
    first, end = NUM_ROWS - used, NUM_ROWS - (length == 0)
    begins = first if pending or not width else first + 1
    rows = list(zip(*(device.get(name).tolist() for name in OWN_ROWS), strict=True))
    for row, (token, position, slot) in enumerate(rows):
        is_used = begins <= row < end
        wanted = device.positions[row] - (width > 0)
        assert (token, position, slot) == ((device.tokens[row], wanted, SLOT) if is_used else (0, 0, -1)), row
    assert device.get("carry_counts").tolist() == [pending, pending, 1 if first < end else pending]
    if width and first < end:
        hidden, carry = device.get("hidden"), device.get("carry_hidden")
        np.testing.assert_array_equal(hidden[first], device.carry[SLOT, 0])
        np.testing.assert_array_equal(carry[SLOT, 0], device.hidden[end])
        np.testing.assert_array_equal(carry[:SLOT], device.carry[:SLOT])
        others = np.arange(NUM_ROWS + 1) != first
        np.testing.assert_array_equal(hidden[others], device.hidden[others])
    state = device.state()
    if length:
        assert device.tree.get("history")[SLOT, POSITION + 1] == 17
        found = [state[name] for name in ("last_token", "position", "num_generated", "max_new_tokens", "finished")]
        assert found == [17, POSITION + 1, 1, length, length == 1]
        assert (state["temperature"], state["top_p"], state["repetition_penalty"]) == (0, 1, 1)
        assert (state["num_stop_ids"], state["num_logprobs"], state["num_logit_biases"]) == (0, 0, 0)
    else:
        assert state["finished"] == 0x01010101


@pytest.mark.parametrize(("slot", "room", "finished"), [(SLOT, POSITION + 2, False), (SLOT, POSITION + 1, True)])
def test_a_chain_ends_where_there_is_no_more_room(cuda: Any, slot: int, room: int, finished: bool) -> None:
    device = ChainDevice(cuda, used=2, slot=slot, room=room)
    device.tree.set("draft_ids", [17])
    device.kernels.begin(NUM_ROWS, 5)
    assert bool(device.state()["finished"]) is finished
    states = device.get("slot_states").view(ss.SLOT_STATE)
    states["position"][SLOT] += 1
    with cuda.stream:
        device.inner["slot_states"].set(states.view(np.uint8))
    device.kernels.goes_on(np.uint64(0))
    assert device.state()["finished"] == 1


def test_a_sequence_that_has_finished_has_no_chain(cuda: Any) -> None:
    device = ChainDevice(cuda, used=0, slot=-1)
    device.tree.set("draft_ids", [17])
    device.kernels.begin(NUM_ROWS, 5)
    device.kernels.goes_on(np.uint64(0))
    device.kernels.end(TreeShape.chain(5))
    assert set(device.get("draft_slots").tolist()) == {-1} and set(device.tree.get("slots")[:6].tolist()) == {-1}
    assert device.state()["finished"] == 0x01010101
    np.testing.assert_array_equal(device.get("carry_hidden"), device.carry)


@pytest.mark.parametrize(("num_drafted", "length", "room"), [(5, 5, CAPACITY), (3, 5, CAPACITY), (5, 5, POSITION + 3)])
def test_the_target_gets_the_chain(cuda: Any, num_drafted: int, length: int, room: int) -> None:
    device, tokens = ChainDevice(cuda, used=3, room=room), list(range(40, 40 + num_drafted))
    device.draft(tokens, length)
    device.kernels.end(TreeShape.chain(length))
    nodes = chain_nodes(5, tokens, length + 1)
    tree = device.tree.tree()
    for name in ("tokens", "parents", "depths"):
        assert tree[name][: length + 1].tolist() == getattr(nodes, name).tolist()
    for row, found in enumerate(device.tree.rows(TARGET_ROW, length + 1)):
        place = POSITION + row
        is_there = row <= num_drafted and place < room
        mask = int(nodes.masks[row])
        assert found == ((nodes.tokens[row], place, SLOT, place, mask, POSITION) if is_there else (0, 0, -1, 0, 1, 0))
    np.testing.assert_array_equal(device.get("carry_hidden")[SLOT, 0], device.hidden[NUM_ROWS])
    assert device.get("carry_counts").tolist() == [3, 3, 1]
