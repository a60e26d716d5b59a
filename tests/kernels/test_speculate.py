"""speculate.cu: the draft's rows for tokens that it has not seen, and the state after a catch-up pass, which drafts
nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from speculation_oracle import Running
from tree_device import DRAFT_ROW, TreeDevice

from cpmrt.cuda.step import structs as ss

pytestmark = pytest.mark.gpu
POISON = 0x1234


def running_with(count: int, width: int, **fields: Any) -> Running:
    rng = np.random.default_rng(count)
    pending = rng.integers(0, 2**16, (count, width), np.uint16)
    tokens = rng.integers(0, 90, 70).tolist()
    return Running(1, tokens, capacity=320, max_context=320, pending=pending, **fields)


def check_rows(device: TreeDevice, running: Running, num_rows: int, offset: int, hidden: Any) -> None:
    assert device.rows(DRAFT_ROW[:4], num_rows) == running.pending_rows(num_rows, offset)
    if hidden is None:
        return
    count = 0 if running.finished else min(len(running.pending), num_rows)
    got = device.cuda.numpy(hidden)
    np.testing.assert_array_equal(got[num_rows - count :], running.pending[len(running.pending) - count :])
    assert (got[: num_rows - count] == POISON).all()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 3, 5, 7, 64])
def test_the_newest_pending_row_is_the_last(cuda: Any, count: int, offset: int, pdl: bool) -> None:
    device, running = TreeDevice(cuda, offset=offset, pdl=pdl), running_with(count, 64)
    device.hold(running)
    hidden = device.cuda.array(np.full((5, 64), POISON, np.uint16)) if offset else None
    device.begin(running, 5, hidden)
    check_rows(device, running, 5, offset, hidden)
    tree = device.tree()
    assert (tree["slot"], tree["position"], tree["root_token"]) == (1, 69, running.tokens[-1])
    assert (tree["capacity"], tree["max_context"], tree["num_generated"]) == (320, 320, 1)
    np.testing.assert_array_equal(device.get("history")[1, :70], running.tokens)


@pytest.mark.parametrize("width", [4096, 12288])
def test_rows_as_wide_as_a_model_has_them(cuda: Any, width: int) -> None:
    device, running = TreeDevice(cuda, width=width), running_with(3, width)
    device.hold(running)
    hidden = device.cuda.array(np.full((4, width), POISON, np.uint16))
    device.begin(running, 4, hidden)
    check_rows(device, running, 4, 1, hidden)


def test_a_finished_sequence_has_only_padding(cuda: Any) -> None:
    device, running = TreeDevice(cuda), running_with(2, 64, finished=True)
    device.hold(running)
    hidden = device.cuda.array(np.full((4, 64), POISON, np.uint16))
    device.begin(running, 4, hidden)
    check_rows(device, running, 4, 1, hidden)
    assert device.tree()["slot"] == -1


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_after_catching_up_the_newest_row_stays(cuda: Any, count: int) -> None:
    device, running = TreeDevice(cuda), running_with(count, 64)
    device.hold(running)
    device.command(ss.CATCH_UP, 1)
    hidden = device.cuda.array(np.full((64, 64), POISON, np.uint16))
    device.kernels.catch_up_begin(64, hidden)
    check_rows(device, running, 64, 1, hidden)
    device.kernels.catch_up_end()
    assert device.words(1) == [ss.NO_TOKEN]
    context = device.get("step_context").view(ss.STEP_CONTEXT)[0]
    assert (context["next_entry"], context["sequence"]) == (1, 1)
    assert device.tree()["num_steps"] == 0
    assert device.get("carry_counts")[1] == min(count, 1)
    np.testing.assert_array_equal(device.get("carry_hidden")[1, : min(count, 1)], running.pending[-1:])
    running.pending = running.pending[-1:]
    device.begin(running, 3)
    assert device.rows(DRAFT_ROW[:4], 3) == running.pending_rows(3, 1)
