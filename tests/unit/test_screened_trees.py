"""A screened head in steps that verify drafted trees, without a GPU: the steps that use it, and their launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from unit.test_inner_draft_launches import DEVICE, Watching, opened
from unit.test_several_drafts import blueprint_of

from cpmrt.cuda.draft import speculation as under_test
from cpmrt.cuda.precompile import modules_of
from cpmrt.executor import Speculate
from cpmrt.ops import ANY_ROWS

__all__ = ["blueprint_of"]
IS_COUNTED, ROWS = -1, -3
"""Places among the arguments of rescore.cu."""
CHAINS: dict[str, Any] = {"shapes": [(7, 1, 8), (32, 1, 33)], "adaptive": False}


def rescored(launcher: Watching) -> list[tuple[int, int]]:
    """Return the rows of each screened head that was launched, and whether its command was counted before."""
    return [(int(args[ROWS]), int(args[IS_COUNTED])) for name, args in launcher.launched if name == "rescore"]


@pytest.mark.parametrize("name", ["eagle2", "lookup"])
def test_trees_of_up_to_32_rows_have_graphs_that_screen_the_head(blueprint_of: Any, name: str) -> None:
    blueprint = blueprint_of(name, lm_head_screen=True)
    launcher, speculation = opened(blueprint)
    heads, found = dict[Any, list[tuple[int, int]]](), dict[Any, int]()
    for key, launch in speculation.launches((64,)).items():
        if key[0] == "speculate":
            launcher.launched = []
            launch()
            heads[key], found[key] = rescored(launcher), [name for name, _ in launcher.launched].count("linear_head")
    assert any(key[2] > 1 and key[-1] for key in heads)
    for (_, shape, count, kind, is_screened), head in heads.items():
        num_rows, other = count * blueprint.draft.shapes[shape].num_nodes, ("speculate", shape, count, kind)
        assert ((*other, True) in heads) == (num_rows <= 32) and (*other, False) in heads
        assert head == [(num_rows, 0)] * is_screened, "the command of a tree is counted when it ends"
        assert found[(*other, is_screened)] == found[(*other, False)] - is_screened, "the whole head is read beside it"


@pytest.mark.parametrize(("step", "may_screen", "name"), [
    (Speculate((0,), 0), True, ("speculate", 0, 1, ANY_ROWS, True)),
    (Speculate((0,), 0), False, ("speculate", 0, 1, ANY_ROWS, False)),
    (Speculate((3, 1, 2), 0), True, ("speculate", 0, 4, ANY_ROWS, True)),
    (Speculate((3, 1, 2, 4, 5), 0), True, ("speculate", 0, 8, ANY_ROWS, False)),
    (Speculate((0,), 1), True, ("speculate", 1, 1, ANY_ROWS, False)),
], ids=str)  # fmt: skip
def test_which_step_takes_them(
    blueprint_of: Any, monkeypatch: pytest.MonkeyPatch, step: Speculate, may_screen: bool, name: Any
) -> None:
    """A step is screened if all its sequences may be and its captured rows, padding included, are few enough."""
    _, speculation = opened(blueprint_of("lookup", CHAINS, lm_head_screen=True))
    sent, ran = list[bool](), list[Any]()
    graphs = SimpleNamespace(run_step=lambda key, slots: ran.append(key))
    rings = SimpleNamespace(
        write_slots=lambda *_: None, sent=lambda *_, is_screened: sent.append(is_screened), next_number=1
    )
    monkeypatch.setattr(speculation, "_rings", rings)
    speculation.speculate(graphs, step, (0,) * len(step.slots), ANY_ROWS, may_screen=may_screen)
    assert ran == [name] and sent == [name[-1]]


@pytest.mark.parametrize("screen", [False, True])
def test_what_verifying_costs_is_timed_as_steps_verify(
    blueprint_of: Any, monkeypatch: pytest.MonkeyPatch, screen: bool
) -> None:
    """Verification is timed as steps do it, screened where steps are, so that costs match steps timed with a greedy
    sequence."""
    launcher, speculation = opened(blueprint_of("lookup", CHAINS, lm_head_screen=screen))
    monkeypatch.setattr(under_test, "launch_seconds", lambda _, launches: float(launches() or 1))
    for shape, num_rows in enumerate((8, 33)):
        launcher.launched = []
        assert speculation.pass_seconds(shape) == (0.0, 1.0)
        assert rescored(launcher) == ([(num_rows, 0)] if screen and num_rows <= 32 else [])


def test_a_draft_does_not_keep_an_automatic_screen_away(blueprint_of: Any) -> None:
    wanted = blueprint_of("lookup", lm_head_screen=True).plan(256)
    assert blueprint_of("lookup").fit(1 << 40) == wanted != blueprint_of("lookup").plan(256)


@pytest.mark.parametrize(("settings", "builds"), [({"max_sequences": 1}, {1, 8}), ({}, {1, 8, 16, 32})], ids=str)
def test_a_start_compiles_what_trees_rescore_with(
    blueprint_of: Any, settings: dict[str, Any], builds: set[int]
) -> None:
    made = modules_of(blueprint_of("lookup", CHAINS, lm_head_screen=True, **settings), DEVICE)
    assert {sizes["ROWS"] for file, sizes in made if file == "screened_head/rescore.cu"} == builds
