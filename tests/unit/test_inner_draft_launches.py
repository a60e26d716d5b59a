"""A small draft model with a draft of its own: its GPU memory and the launches of its graphs, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.bench.shapes import config_folder, draft_configs, shape_config
from cpmrt.config import EngineConfig
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.draft.speculation import Speculation
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear_packed.products import held_weights
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.cuda.step.forward import StepForward
from cpmrt.dtypes import DType
from cpmrt.opening import described
from cpmrt.ops import ANY_ROWS
from cpmrt.weights.model_folder import ModelFolder

SHAPE = shape_config("minicpm4-0.5b") | {"num_hidden_layers": 3}
SMALL = SHAPE | {"num_hidden_layers": 2}
DEVICE = known_device("sm_90")
LOOP = "loop"
DRAFTING = {
    *("speculate_begin", "draft_top_k", "tree_grow", "tree_finish", "lookup", "block_begin", "markov_chain", "accept"),
    *("chain_begin", "chain_goes_on", "chain_end", "sample_tree", "prefill_rows", "catch_up_end", "linear_head", LOOP),
}
PASS, VERIFIED = ["linear_head", "draft_top_k"], ["linear_head", "sample_tree", "accept"]
ROUNDS = {
    "eagle2": ((2, 4, 6), ["speculate_begin", *PASS, "tree_grow", *PASS, "tree_finish", *VERIFIED]),
    "dspark": ((3, 1, 4), ["speculate_begin", "block_begin", *PASS, "markov_chain", *VERIFIED]),
    "small": ((1, 1, 2), ["speculate_begin", *PASS, "tree_finish", *VERIFIED]),
    "lookup": ((3, 1, 4), ["speculate_begin", "lookup", *VERIFIED]),
}
"""Each inner draft's shape, and the kernels that a step of the small model launches with it."""


class Watching(Launcher):
    """A launcher that records the kernels and arguments it is asked to launch."""

    is_recording = True

    def __init__(self) -> None:
        super().__init__(None, Modules(DEVICE.arch, DType.BFLOAT16), use_pdl=False)
        self.launched: list[tuple[str, tuple[Any, ...]]] = []

    def __call__(self, spec: Any, constants: Any, grid: Any, block: int, *args: Any, **options: Any) -> None:
        self.launched.append((spec.name, args))

    def drafting(self) -> list[str]:
        """Return the kernels of drafting, heads included, launched since the last call."""
        names = [name for name, _ in self.launched if name in DRAFTING]
        self.launched.clear()
        return names


@pytest.fixture(scope="module")
def blueprint_of():
    """A function that makes a blueprint with a small model drafting chains of 5, and `inner` or nothing drafting for
    it."""
    drafts = draft_configs("minicpm4-0.5b")
    drafts["dspark"]["target_layer_ids"] = [0]
    with config_folder(SHAPE, drafts | {"small": SMALL}) as folder:

        def blueprint(inner: str | None, **more: Any) -> Any:
            wish: dict[str, Any] = {"shapes": [(5, 1, 6)], **more}
            if inner is not None:
                name = inner if inner == "lookup" else f"{folder}/{inner}"
                wish["inner"] = {"draft": name, "shapes": [ROUNDS[inner][0]]}
            settings = EngineConfig(load_format="dummy", max_context=256, prefill_chunk=64)
            model = ModelFolder.open(folder, weights=False)
            return described(model, settings, CudaTarget(DEVICE), "small", wish)

        yield blueprint


def opened(blueprint: Any) -> tuple[Watching, Any]:
    """Return a launcher that records launches and the Speculation that uses it; a loop is recorded as LOOP and its
    body once."""
    plan, launcher = blueprint.plan(256), Watching()
    config = blueprint.config.for_context(256)
    arrays: dict[str, Any] = {
        region.name: np.broadcast_to(np.zeros((), region.dtype), region.shape) for region in plan.regions
    }
    arrays |= held_weights(plan.tensors, arrays, DEVICE)
    gemm = Gemm(DEVICE, launcher, arrays["gemm_workspace"], use_library=False)
    forward = StepForward(config, DEVICE, launcher, gemm, arrays, plan.caches, blueprint.draft.config.taps)

    def loop(body: Any, goes_on: Any, at_most: int) -> None:
        assert at_most == 4
        launcher.launched.append((LOOP, ()))
        body()
        goes_on(np.uint64(9))

    addresses = np.uint64(1), np.uint64(2)
    rings: Any = type("Rings", (), {"addresses": addresses, "command_bytes": 64, "next_number": 1})
    return launcher, Speculation(
        blueprint.draft, config, DEVICE, launcher, gemm, arrays, rings, forward, plan, loop
    )  # fmt: skip


@pytest.mark.parametrize("inner", ROUNDS)
@pytest.mark.parametrize("lookup", [0, 9])
def test_a_step_drafts_until_the_chain_is_there_and_verifies_it(blueprint_of: Any, inner: str, lookup: int) -> None:
    launcher, speculation = opened(blueprint_of(inner, **({"lookup": lookup} if lookup else {})))
    speculation.launches((64,))["speculate", 0, 1, ANY_ROWS, False]()
    begin = ["speculate_begin", *PASS, "chain_begin"]
    end = ["chain_end", *["lookup"] * (lookup > 0), *VERIFIED]
    assert launcher.drafting() == [*begin, LOOP, *ROUNDS[inner][1], "chain_goes_on", *end]


def test_only_the_targets_step_is_reported(blueprint_of: Any) -> None:
    launcher, speculation = opened(blueprint_of("eagle2"))
    speculation.launches((64,))["speculate", 0, 1, ANY_ROWS, False]()
    (_, of_small), (_, of_target) = (launch for launch in launcher.launched if launch[0] == "accept")
    token_counts, results = 2, 9
    assert of_small[token_counts] is None and of_small[results] is None
    assert of_target[token_counts] is not None and of_target[results] == 2


@pytest.mark.parametrize(("inner", "shown"), [("eagle2", True), ("dspark", True), ("small", True), ("lookup", False)])
def test_the_inner_draft_is_shown_what_the_small_model_sees(blueprint_of: Any, inner: str, shown: bool) -> None:
    launcher, speculation = opened(blueprint_of(inner))
    launches = speculation.launches((64,))
    launches["draft", 64]()
    assert launcher.drafting() == ["prefill_rows"] * (1 + shown)
    launches["catch_up"]()
    assert launcher.drafting() == ["speculate_begin", "linear_head", "chain_begin", "catch_up_end"]


@pytest.mark.parametrize("inner", ROUNDS)
def test_all_of_it_is_in_the_plan(blueprint_of: Any, inner: str) -> None:
    plans = {name: blueprint_of(name).plan(256) for name in (None, inner)}
    more = {region.name for region in plans[inner].regions} - {region.name for region in plans[None].regions}
    assert all(name.startswith("draft.") for name in more)
    assert {"draft.draft_tree", "draft.slot_states", "draft.carry_counts", "draft.draft_ids"} <= more
    assert ("draft.carry_hidden" in more) == ("draft.carry_kept" in more) == (inner in ("eagle2", "dspark"))
    parts, alone = (plans[name].part_bytes for name in (inner, None))
    columns = {"eagle2": 64, "dspark": 5 * 128, "small": 2 * 64, "lookup": 0}[inner]
    kv = 2 * 2 * 256 * columns * SHAPE["num_key_value_heads"]
    assert parts.get("draft KV", 0) == alone["draft KV"] + kv
    assert plans[inner].total_bytes - plans[None].total_bytes >= kv


@pytest.mark.parametrize("inner", ROUNDS)
def test_a_start_compiles_its_kernels_ahead_of_time(blueprint_of: Any, inner: str) -> None:
    found = {
        name: {(file, frozenset(sizes.items())) for file, sizes in modules_of(blueprint_of(name), DEVICE)}
        for name in (None, inner)
    }
    assert found[None] <= found[inner] and "draft/chain.cu" in {file for file, _ in found[inner]}
    _, speculation = opened(blueprint_of(inner))
    asked = {(file, frozenset(sizes.items())) for file, sizes in speculation.modules()}
    assert asked <= found[inner]
