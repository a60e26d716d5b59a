"""Steps that fail while they are submitted, without a device: nothing is left for the next step with their number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.test_beside_steps import executor, module
from unit.test_rings import HostMemory

from cpmrt.cuda.driver import host_memory
from cpmrt.cuda.ops.slot_states import COPY_STATE, SlotStates
from cpmrt.cuda.step import masks as under_test
from cpmrt.cuda.step.masks import MaskedGraphs, MaskedTree, MaskRing, TreeRing
from cpmrt.cuda.step.structs import RING_ENTRIES
from cpmrt.errors import MemoryPlanError
from cpmrt.executor import Mask, Prefill, TreeMasks

__all__ = ["executor", "module"]
NUMBER, ANY, MASKED = 5, 1, 2


@pytest.fixture(autouse=True)
def page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    HostMemory.all = []
    for patched in (host_memory, under_test):
        monkeypatch.setattr(patched, "HostBuffer", HostMemory)


def ready(ring: MaskRing) -> list[int]:
    """Return the ready words of the mask ring, which the device compares with the number of its command."""
    words: list[int] = ring._ready_words[(NUMBER - 1) % RING_ENTRIES].tolist()
    return words


def test_a_step_does_not_take_the_masks_of_one_that_was_never_launched() -> None:
    """The masks of a step that was never launched, filled as free, do not count for the next step with its number."""
    ring, failed, masked = MaskRing(2, 9), Mask(), Mask()
    ring.write(NUMBER, (failed, None))
    failed.fill(None)
    assert ready(ring) == [NUMBER << 2 | ANY] * 2
    ring.write(NUMBER, (masked,))
    assert ready(ring) == [0, 0]
    masked.fill(b"\x07\x01")
    assert ready(ring) == [NUMBER << 2 | MASKED, 0]


def test_nor_does_a_tree() -> None:
    ring, failed = TreeRing(9), TreeMasks()
    MaskedTree(ring, NUMBER, 3, failed)
    failed.let_go()
    assert ready(ring.masks)[0] == NUMBER << 2 | ANY
    MaskedTree(ring, NUMBER, 3, TreeMasks())
    assert not any(ready(ring.masks))


def test_a_prompt_under_a_form_is_not_begun_where_its_first_token_cannot_be_sampled(executor: Any) -> None:
    """If capturing the first token's graph fails, the prompt is not started, so that host and device count the same
    commands."""
    started = list[Any]()

    def refuse(key: Any, launches: Any) -> None:
        raise MemoryPlanError("the GPU has less free memory than was planned for")

    graphs: Any = SimpleNamespace(add=refuse, run=started.append)
    masks: Any = SimpleNamespace(write=lambda number, rows: None)
    executor._graphs, executor._rings = graphs, SimpleNamespace(write=lambda step: None, next_number=NUMBER)
    launches: Any = lambda rows, kind: None, lambda: None
    executor.__dict__["_masked"] = MaskedGraphs(graphs, masks, lambda rows: None, {}, *launches)
    with pytest.raises(MemoryPlanError):
        executor._submit_prefill(Prefill(0, (1, 2), 0, True, Mask()))
    assert not started


def test_what_copies_states_is_loaded_before_the_first_admission() -> None:
    loaded = list[Any]()
    launcher: Any = SimpleNamespace(modules=SimpleNamespace(kernel=lambda spec, sizes: loaded.append((spec, sizes))))
    SlotStates(launcher, ()).load()
    assert not loaded
    state: Any = np.zeros((1, 1, 4), np.float32)
    SlotStates(launcher, [(state, state)]).load()
    assert loaded == [(COPY_STATE, {})]
