"""Masks on their way to the device, without one: bits beyond the vocabulary, trees, and graphs that wait for masks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.test_rings import HostMemory

from cpmrt.cuda.driver import host_memory
from cpmrt.cuda.step import masks as under_test
from cpmrt.cuda.step.masks import MaskedGraphs, MaskedTree, MaskRing, TreeRing
from cpmrt.cuda.step.structs import RING_ENTRIES
from cpmrt.errors import MaskError
from cpmrt.executor import MAX_ROWS, Mask, TreeMasks
from cpmrt.ops import ANY_ROWS

NUMBER, CUT, ANY, MASKED = 5, 0, 1, 2
ABSENT = 0xFF
"""The parent that the device reports of a node that does not exist."""


@pytest.fixture(autouse=True)
def page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    HostMemory.all = []
    for patched in (host_memory, under_test):
        monkeypatch.setattr(patched, "HostBuffer", HostMemory)


def bits_of(ring: MaskRing, row: int) -> list[int]:
    """Return the tokens that a row may sample, as the device finds them in 32-bit words of the last buffer."""
    words = HostMemory.all[-1].bytes.view(np.uint32).reshape(RING_ENTRIES, ring.num_rows, -1)[NUMBER - 1, row]
    return [32 * index + bit for index, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1]


@pytest.mark.parametrize("vocab_size", [5, 8, 13, 32, 33, 40])
def test_no_token_beyond_the_vocabulary_is_allowed(vocab_size: int) -> None:
    ring, mask = MaskRing(2, vocab_size), Mask()
    ring.write(NUMBER, (None, mask))
    mask.fill(b"\xff" * 8)
    assert bits_of(ring, 1) == list(range(vocab_size))


def test_a_mask_that_is_shorter_than_the_vocabulary_allows_nothing_behind_its_end() -> None:
    ring = MaskRing(1, 40)
    for bits in (b"\xff" * 5, b"\x81"):
        mask = Mask()
        mask.fill(bits)
        ring.write(NUMBER, (mask,))
    assert bits_of(ring, 0) == [0, 7]


def report(ring: TreeRing, *nodes: tuple[int, int]) -> None:
    """Write tokens and parents of a tree as the device does."""
    words = HostMemory.all[0].bytes.view(np.uint64).reshape(RING_ENTRIES, MAX_ROWS)
    words[NUMBER - 1, : len(nodes)] = [NUMBER << 40 | parent << 32 | token for token, parent in nodes]


def ready(ring: TreeRing) -> list[int]:
    words: list[int] = ring.masks._ready_words[NUMBER - 1].tolist()
    return words


def test_nodes_that_do_not_exist_are_cut_and_so_are_those_without_a_mask() -> None:
    asked = []

    def find(paths: Any) -> dict[Any, bytes | None]:
        asked.extend(paths)
        return {(): b"\x01", (7,): None}

    ring = TreeRing(9)
    tree = MaskedTree(ring, NUMBER, 4, TreeMasks(find=find))
    assert tree(), "the device has not reported the tree"
    report(ring, (3, ABSENT), (7, 0), (8, 1), (0, ABSENT))
    assert not tree()
    assert asked == [(), (7,), (7, 8)]
    assert ready(ring)[:4] == [NUMBER << 2 | state for state in (MASKED, ANY, CUT, CUT)]


def test_letting_a_tree_go_changes_no_masks_that_are_written() -> None:
    ring, masks = TreeRing(9), TreeMasks({(): b"\x01"})
    tree = MaskedTree(ring, NUMBER, 1, masks)
    report(ring, (3, ABSENT))
    assert not tree()
    assert masks.on_let_go is not None
    masks.on_let_go()
    assert ready(ring)[0] == NUMBER << 2 | MASKED


@pytest.mark.parametrize(("silent_s", "is_late"), [(9.0, False), (11.0, True)])
def test_masks_that_come_after_the_device_has_given_up_are_an_error(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, is_late: bool
) -> None:
    """The kernel waits for ten seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(under_test, "perf_counter", lambda: clock.now)
    tree = MaskedTree(TreeRing(9), NUMBER, 1, TreeMasks())
    clock.now += silent_s
    if is_late:
        with pytest.raises(MaskError, match="in time"):
            tree()
    else:
        assert tree()


def test_the_graph_of_a_first_token_is_captured_once() -> None:
    captured, started = list[Any](), list[Any]()
    graphs: Any = SimpleNamespace(add=lambda key, launches: captured.append(key), run=started.append)
    masks: Any = SimpleNamespace()
    made = MaskedGraphs(graphs, masks, lambda rows: None, {}, lambda rows, kind: None, lambda: None)
    for _ in range(2):
        made.prepare_first()
        made.run_first()
        made.run_decode(2, ANY_ROWS)
    assert len(captured) == len(set(captured)) == 2 and len(started) == 4
