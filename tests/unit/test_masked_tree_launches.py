"""A drafted step under masks, without a GPU: every node that it verifies is reported, masked and sampled."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from unit.test_inner_draft_launches import SHAPE, opened
from unit.test_several_drafts import blueprint_of

from cpmrt.cuda.draft import speculation as under_test
from cpmrt.errors import MemoryPlanError
from cpmrt.executor import TreeMasks
from cpmrt.ops import ANY_ROWS, RowKind

__all__ = ["blueprint_of"]
SPARSE = {"window_size": 64, "topk": 2, "dense_len": 100}


class HeldGraphs(dict[Hashable, Callable[[], None]]):
    """Stand-in for graphs that keeps the launches to capture, and the name of the graph that was run last."""

    def add(self, name: Hashable, launches: Callable[[], None]) -> None:
        self[name] = launches

    def run(self, name: Hashable) -> None:
        assert name in self
        self.ran = name


class Ring:
    """Stand-in for a `TreeRing` with made-up addresses; `written` has the node counts written to it."""

    def __init__(self, vocab_size: int):
        self.address, self.written = np.uint64(3), list[int]()
        addresses = np.uint64(4), np.uint64(5)
        self.masks = SimpleNamespace(
            addresses=addresses, num_rows=64, num_words=9, forget=lambda number: None,
            write_nodes=lambda _, count, left: self.written.append(count),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "lookup"), [*product(("eagle2", "eagle3", "dspark", "small"), (None, 3, 11)), ("lookup", None)]
)
def test_every_node_has_a_mask(
    blueprint_of: Any, monkeypatch: pytest.MonkeyPatch, name: str, lookup: int | None
) -> None:
    monkeypatch.setattr(under_test, "TreeRing", Ring)
    blueprint = blueprint_of(name, {"lookup": lookup} if lookup else "auto")
    launcher, speculation = opened(blueprint)
    graphs: Any = HeldGraphs()
    num_waiting = under_test.waiting_rows(blueprint.draft)
    for number, shape in enumerate(blueprint.draft.shapes):
        masks = TreeMasks()
        tree = speculation._start_masked(graphs, number, num_waiting, ANY_ROWS, masks)
        launcher.launched = []
        graphs["speculate under masks", number, num_waiting, ANY_ROWS]()
        given = dict(launcher.launched)
        assert given["report_tree"][-1] == given["sample_masked_tree"][4].shape[0] == shape.num_nodes
        masks.let_go()
        assert tree._ring.written[-1] == shape.num_nodes


def test_nodes_of_each_kind_have_graphs_of_their_own(blueprint_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of all shapes are captured with the first one, per row kind; nodes that see few keys choose no
    blocks."""
    monkeypatch.setattr(under_test, "TreeRing", Ring)
    blueprint = blueprint_of("lookup", target=SHAPE | {"sparse_config": SPARSE})
    launcher, speculation = opened(blueprint)
    num_waiting, graphs = under_test.waiting_rows(blueprint.draft), HeldGraphs()
    held: Any = graphs
    launched = dict[RowKind, list[str]]()
    for kind in (RowKind(is_dense=True), ANY_ROWS):
        speculation._start_masked(held, 1, num_waiting, kind, TreeMasks())
        assert len(graphs) == 2 * len(blueprint.draft.shapes)
        assert graphs.ran == ("speculate under masks", 1, num_waiting, kind)
        launcher.launched = []
        graphs[graphs.ran]()
        launched[kind] = [name for name, _ in launcher.launched]
    dense, other = launched.values()
    assert len(dense) < len(other) and "pick_blocks" in other and "pick_blocks" not in dense


@pytest.mark.parametrize("name", ["eagle2", "lookup"])
def test_what_could_not_be_captured_is_captured_by_the_next_step(
    blueprint_of: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a failed capture the next step captures what is missing, as nothing may be captured while a tree awaits
    masks."""
    monkeypatch.setattr(under_test, "TreeRing", Ring)
    blueprint = blueprint_of(name)
    _, speculation = opened(blueprint)
    num_waiting, graphs = under_test.waiting_rows(blueprint.draft), HeldGraphs()
    names = [("speculate under masks", shape, num_waiting, ANY_ROWS) for shape in range(len(blueprint.draft.shapes))]

    def add(key: Hashable, launches: Callable[[], None]) -> None:
        if key == names[1]:
            raise MemoryPlanError("the GPU has less free memory than was planned for")
        graphs[key] = launches

    full: Any = SimpleNamespace(add=add)
    with pytest.raises(MemoryPlanError):
        speculation._start_masked(full, 1, num_waiting, ANY_ROWS, TreeMasks())
    assert [*graphs] == names[:1]
    masked: Any = graphs
    speculation._start_masked(masked, 1, num_waiting, ANY_ROWS, TreeMasks())
    assert [*graphs] == names
