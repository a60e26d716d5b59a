"""Steps that draft for several sequences, without a GPU: the number of sequences they take, and their launches."""

from __future__ import annotations

from typing import Any

import pytest
from unit.test_inner_draft_launches import DEVICE, SHAPE, SMALL, opened

from cpmrt.bench.shapes import config_folder, draft_configs, shape_config
from cpmrt.config import EngineConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.draft.several import captured_count, captured_counts, most_sequences
from cpmrt.opening import Blueprint, described
from cpmrt.weights.model_folder import ModelFolder

DRAFTS = ("eagle2", "eagle3", "dspark", "small", "lookup")


@pytest.fixture(scope="module")
def blueprint_of():
    """A function that makes a blueprint with the named draft and engine settings; `target` replaces config.json."""
    drafts = draft_configs("minicpm4-0.5b") | {"small": SMALL}
    drafts["dspark"]["target_layer_ids"] = [0]
    drafts["eagle3"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]

    def blueprint(name: str, wish: Any = "auto", target: dict[str, Any] = SHAPE, **settings: Any) -> Blueprint:
        with config_folder(target, drafts) as folder:
            draft = name if name == "lookup" else f"{folder}/{name}"
            engine = EngineConfig(
                **{"load_format": "dummy", "max_context": 256, "prefill_chunk": 64, "max_sequences": 8} | settings
            )
            return described(ModelFolder.open(folder, weights=False), engine, CudaTarget(DEVICE), draft, wish)

    return blueprint


def most_of(blueprint: Blueprint) -> tuple[int, ...]:
    assert blueprint.draft is not None
    return most_sequences(blueprint.draft, blueprint.plan(256).caches)


def launched(blueprint: Blueprint) -> dict[Any, list[tuple[str, tuple[Any, ...]]]]:
    """Return the kernels and arguments that each graph of drafting launches, by the graph's key."""
    (launcher, speculation), found = opened(blueprint), {}
    for name, launch in speculation.launches((64,)).items():
        launcher.launched = []
        launch()
        found[name] = launcher.launched
    return found


@pytest.mark.parametrize(("name", "expected"), [
    ("eagle2", (5, 8, 2, 2)), ("eagle3", (5, 8, 2, 2)), ("dspark", (8, 8, 8)), ("small", (7, 7, 7)),
    ("lookup", (8, 8, 7)),
])  # fmt: skip
def test_as_many_as_there_are_rows_for(blueprint_of: Any, name: str, expected: tuple[int, ...]) -> None:
    """A step takes as many sequences as 64 rows hold: of nodes, a frontier, tokens that wait for the draft, and
    blocks."""
    assert most_of(blueprint_of(name)) == expected
    assert most_of(blueprint_of(name, max_sequences=3)) == tuple(min(3, most) for most in expected)
    assert most_of(blueprint_of(name, max_sequences=1)) == (1,) * len(expected)


def test_what_keeps_a_step_to_one_sequence(blueprint_of: Any) -> None:
    sala = shape_config("minicpm-sala-9b")
    recurrent = sala | {"num_hidden_layers": 2, "mixer_types": sala["mixer_types"][:2]}
    inner = {"shapes": [(3, 1, 4)], "inner": "lookup"}
    for blueprint in (
        blueprint_of("lookup", target=recurrent),
        blueprint_of("small", inner),
    ):
        assert set(most_of(blueprint)) == {1}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("lookup", [0, 9])
def test_steps_of_several_launch_what_steps_of_one_do(blueprint_of: Any, name: str, lookup: int) -> None:
    """Steps of several sequences launch the kernels of steps of one, with a tree for each, and all fit in the
    buffers."""
    if name == "lookup" and lookup:
        return
    found = launched(blueprint_of(name, {"lookup": lookup} if lookup else "auto"))
    steps = {key: launches for key, launches in found.items() if key[0] == "speculate"}
    assert {count for _, _, count, _, _ in steps} >= {1, 2, 4}
    drafting = ("speculate_begin", "draft_top_k", "tree_grow", "tree_finish", "lookup", "block_begin", "markov_chain",
                "sample_tree", "accept")  # fmt: skip
    for (_, shape, _, kind, _), launches in steps.items():
        of_one = [kernel for kernel, _ in steps["speculate", shape, 1, kind, False] if kernel in drafting]
        assert [kernel for kernel, _ in launches if kernel in drafting] == of_one
    num_trees = 15
    begun = {key: launches[0][1][num_trees] for key, launches in steps.items()}
    assert all(trees == key[2] for key, trees in begun.items())


@pytest.mark.parametrize("most", range(1, 9))
def test_a_step_is_captured_for_each_number_or_a_larger_one(most: int) -> None:
    counts = captured_counts(most)
    assert counts[0] == 1 and counts[-1] == most and list(counts) == sorted(set(counts))
    assert all(captured_count(number, most) in counts for number in range(1, most + 1))
    assert all(number <= captured_count(number, most) < 2 * number for number in range(1, most + 1))


