"""carry.cu: the draft's rows for prompts that come in several chunks, and the carried hidden states of decode steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tree_device import SLOTS, TreeDevice

pytestmark = pytest.mark.gpu
POISON = 0x1234


def prefill(device: TreeDevice, slot: int, tokens: list[int], start: int, states: Any, bucket: int) -> Any:
    """Run one chunk, with the target's hidden states `states` [tokens, width], and return the hidden states that the
    draft's rows then read."""
    device.set("token_ids", np.array(tokens, np.int32))
    device.set("chunk", np.array([slot, start, len(tokens), 1], np.int32))
    buffer = np.full((bucket + 1, device.width), POISON, np.uint16)
    buffer[1 : len(tokens) + 1] = states
    on_device = device.cuda.array(buffer)
    device.kernels.prefill_rows(bucket, on_device)
    return device.cuda.numpy(on_device)


@pytest.mark.parametrize("chunks", [(5,), (1,), (3, 1, 4), (64, 64, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("width", [64, 12288])
def test_a_prompt_in_chunks_reaches_the_draft_as_one(cuda: Any, chunks: tuple[int, ...], width: int) -> None:
    """Row q of the draft has token q + 1 and the target's state of position q, for every q but the last."""
    device, rng, slot = TreeDevice(cuda, width=width), np.random.default_rng(0), 2
    tokens = rng.integers(0, 90, sum(chunks))
    states = rng.integers(0, 2**16, (len(tokens), width), np.uint16)
    device.set("carry_counts", np.zeros(SLOTS, np.int32))
    seen, start = {}, 0
    for count in chunks:
        end = start + count
        read = prefill(device, slot, tokens[start:end].tolist(), start, states[start:end], 65)
        draft = [device.get(f"draft_{name}")[:65].tolist() for name in ("token_ids", "positions", "slots")]
        for row, (token, position, own) in enumerate(zip(*draft, strict=True)):
            if own >= 0:
                assert own == slot and position == start - 1 + row and row < count
                seen[position] = (token, read[row])
            else:
                assert (token, position) == (0, 0) and (row >= count or start + row == 0)
        assert device.get("draft_chunk").tolist() == [slot, start - 1, count, 1]
        assert device.get("carry_counts").tolist() == [0, 0, 1]
        np.testing.assert_array_equal(device.get("carry_hidden")[slot, 0], states[end - 1])
        start = end
    assert sorted(seen) == list(range(len(tokens) - 1))
    for position, (token, state) in seen.items():
        assert token == tokens[position + 1]
        np.testing.assert_array_equal(state, states[position])


def test_behind_a_cached_prefix_the_first_row_is_padding(cuda: Any) -> None:
    device = TreeDevice(cuda)
    device.set("carry_counts", np.zeros(SLOTS, np.int32))
    prefill(device, 0, [7, 8, 9], 128, np.zeros((3, 64), np.uint16), 4)
    assert device.get("draft_slots")[:4].tolist() == [-1, 0, 0, -1]
    assert device.get("draft_positions")[:4].tolist() == [0, 128, 129, 0]


def test_an_independent_model_has_the_targets_rows(cuda: Any) -> None:
    device = TreeDevice(cuda, offset=0)
    device.set("carry_counts", np.zeros(SLOTS, np.int32))
    device.set("token_ids", np.array([7, 8], np.int32))
    device.set("chunk", np.array([1, 0, 2, 0], np.int32))
    device.kernels.prefill_rows(3)
    rows = [device.get(f"draft_{name}")[:3].tolist() for name in ("token_ids", "positions", "slots")]
    assert rows == [[7, 8, 0], [0, 1, 0], [1, 1, -1]]
    assert device.get("draft_chunk").tolist() == [1, 0, 2, 0]
    assert device.get("carry_counts").tolist() == [0, 1, 0]


@pytest.mark.parametrize("width", [64, 4096])
def test_rows_of_a_slot_are_appended_in_their_order(cuda: Any, width: int) -> None:
    device, rng = TreeDevice(cuda, width=width), np.random.default_rng(2)
    device.set("carry_counts", np.array([0, 62, 5], np.int32))
    before = device.get("carry_hidden")
    for counts, slots, places in (
        ([3, 63, 5], [0, 0, 0, 1], [0, 1, 2, 62]), ([3, 64, 7], [2, 2, -1, 1], [5, 6, -1, 63]),
        ([35, 64, 39], [0] * 32 + [2] * 32, [*range(3, 35), *range(7, 39)]),
    ):  # fmt: skip
        hidden = rng.integers(0, 2**16, (len(slots), width), np.uint16)
        device.set("slots", np.array(slots, np.int32))
        device.kernels.carry_rows(len(slots), device.cuda.array(hidden))
        assert device.get("carry_counts").tolist() == counts
        for row, (slot, place) in enumerate(zip(slots, places, strict=True)):
            if slot >= 0:
                before[slot, place] = hidden[row]
        np.testing.assert_array_equal(device.get("carry_hidden"), before)


@pytest.mark.parametrize("width", [64, 4096])
def test_decode_steps_append_a_row_each(cuda: Any, width: int) -> None:
    device, rng = TreeDevice(cuda, width=width), np.random.default_rng(1)
    device.set("carry_counts", np.array([0, 62, 5], np.int32))
    before = device.get("carry_hidden")
    for counts, slots in (([1, 63, 5], [1, 0]), ([2, 64, 5], [1, -1, 0]), ([3, 1, 5], [0, 1])):
        hidden = rng.integers(0, 2**16, (len(slots), width), np.uint16)
        device.set("slots", np.array(slots, np.int32))
        device.kernels.carry_rows(len(slots), device.cuda.array(hidden))
        assert device.get("carry_counts").tolist() == counts
        for row, slot in enumerate(slots):
            if slot >= 0:
                before[slot, counts[slot] - 1] = hidden[row]
        np.testing.assert_array_equal(device.get("carry_hidden"), before)
