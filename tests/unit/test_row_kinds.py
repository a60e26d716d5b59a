"""The graphs that decode steps and trees have, and the executor's choice among them, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_module import executor_module

from cpmrt.bench.shapes import config_folder, gptq_config, shape_config
from cpmrt.config import EngineConfig, TreeShape
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear_packed.products import held_weights
from cpmrt.cuda.precompile import known_device
from cpmrt.cuda.step.forward import StepForward
from cpmrt.cuda.step.lengths import Lengths
from cpmrt.cuda.step.masks import MaskedGraphs
from cpmrt.executor import Decode, Mask, Prefill, Speculate, TreeMasks
from cpmrt.opening import described
from cpmrt.ops import ANY_ROWS, SHORT_KEYS, RowKind
from cpmrt.weights.model_folder import ModelFolder

H200 = known_device("sm_90")
PORTABLE = replace(H200, capability=86, shared_bytes_per_block=101_376, whole_clusters=0)
EIGHT_B, HALF_B, TWO_B = (
    shape_config(name) | {"num_hidden_layers": 1} for name in ("minicpm4-8b", "minicpm4-0.5b", "minicpm5-2b")
)
PACKED = {"quantization_config": gptq_config()}
SPARSE = {"dense_len": 3 * SHORT_KEYS}
SHORT, INSIDE, DENSE = RowKind("short"), RowKind(is_inside=True), RowKind(is_dense=True)
INSIDE_DENSE = replace(DENSE, is_inside=True)
SHORT_DENSE = replace(INSIDE_DENSE, length="short")


def forward_of(
    config: dict[str, Any], device: Device = H200, sparse: Any = "off", draft: str | None = None, **settings: Any
) -> StepForward:
    """Return the forward that a start on this device makes, on arrays without memory."""
    engine = EngineConfig(load_format="dummy", **{"max_context": 65536} | settings)
    with config_folder(config, {}) as folder:
        model = ModelFolder.open(folder, weights=False, sparse=sparse)
        blueprint = described(model, engine, CudaTarget(device), draft, "auto")
    plan, word = blueprint.plan(blueprint.position_limit), np.zeros((), np.uint16)
    arrays: dict[str, Any] = {region.name: np.broadcast_to(word, region.shape) for region in plan.regions}
    arrays |= held_weights(plan.tensors, arrays, device)
    launcher = Launcher(None, Modules(device.arch, blueprint.dtype), use_pdl=False)
    gemm = Gemm(device, launcher, arrays["gemm_workspace"], use_library=False)
    return StepForward(model.config.for_context(plan.max_context), device, launcher, gemm, arrays, plan.caches)


@pytest.mark.parametrize(("config", "options", "kinds"), [
    (EIGHT_B, {}, [SHORT, ANY_ROWS]),
    (EIGHT_B | PACKED, {}, [SHORT, ANY_ROWS]),
    (EIGHT_B, {"kv_dtype": "fp8"}, [SHORT, ANY_ROWS]),
    (EIGHT_B, {"draft": "lookup"}, [SHORT, ANY_ROWS]),
    (EIGHT_B, {"max_context": SHORT_KEYS}, [ANY_ROWS]),
    (EIGHT_B, {"device": PORTABLE}, [ANY_ROWS]),
    (EIGHT_B, {"device": known_device("sm_89")}, [ANY_ROWS]),
    (HALF_B | PACKED, {}, [SHORT, ANY_ROWS]),
    (HALF_B | PACKED, {"max_context": SHORT_KEYS}, [SHORT, ANY_ROWS]),
    (TWO_B | PACKED, {"max_context": SHORT_KEYS}, [SHORT, ANY_ROWS]),
    (TWO_B | PACKED, {"max_context": SHORT_KEYS, "kv_dtype": "fp8"}, [ANY_ROWS]),
    (TWO_B, {"max_context": SHORT_KEYS}, [ANY_ROWS]),
    (TWO_B | PACKED, {"device": PORTABLE}, [ANY_ROWS]),
    (shape_config("minicpm3-4b") | {"num_hidden_layers": 1}, {"max_context": 4096}, [ANY_ROWS]),
    (EIGHT_B, {"sparse": SPARSE}, [SHORT_DENSE, INSIDE_DENSE, INSIDE, ANY_ROWS]),
    (EIGHT_B, {"sparse": SPARSE, "kv_dtype": "fp8"}, [SHORT_DENSE, INSIDE_DENSE, INSIDE, ANY_ROWS]),
    (EIGHT_B, {"sparse": SPARSE, "device": PORTABLE}, [INSIDE_DENSE, INSIDE, ANY_ROWS]),
    (EIGHT_B, {"sparse": SPARSE, "draft": "lookup"}, [replace(DENSE, length="short"), DENSE, ANY_ROWS]),
])  # fmt: skip
def test_the_kinds_of_one_row(config: dict[str, Any], options: dict[str, Any], kinds: Sequence[RowKind]) -> None:
    """One row has the expected kinds; where q, k, v and attention are one launch, or attention starts before its
    product has waited, short rows have a kind in any context."""
    assert list(forward_of(config, **options).row_kinds(1)) == kinds


def test_attention_starts_before_its_product_waits_only_behind_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then reads early what is older than `embed`, which starts the next kernel behind its own wait."""
    launched = list[tuple[str, Any]]()

    def note(self: Launcher, spec: Any, constants: Any, *args: Any, **options: Any) -> None:
        launched.append((spec.name, getattr(constants, "trigger", None)))

    forward = forward_of(TWO_B | PACKED | {"num_hidden_layers": 3})
    monkeypatch.setattr(Launcher, "__call__", note)
    for rows, kind, trigger in ((1, SHORT, 3), (1, ANY_ROWS, 0), (2, ANY_ROWS, 2)):
        launched.clear()
        forward.decode(rows, kind=kind)
        assert launched[0][0] == "embed"
        assert [found for name, found in launched if name == "linear_packed_qkv"] == [trigger] * 3


def test_several_rows_are_never_short() -> None:
    for options in ({}, {"sparse": SPARSE}):
        forward = forward_of(EIGHT_B, **options)
        kinds = {kind for rows in (2, 4, 8, 16, 32, 64) for kind in forward.row_kinds(rows)}
        assert kinds == {DENSE if options else RowKind("long"), ANY_ROWS}


def chosen(monkeypatch: pytest.MonkeyPatch, forward: StepForward, prompt: int, steps: int) -> list[RowKind]:
    """Return the kinds of the graphs that the executor runs for the first steps after a prompt of `prompt` tokens."""
    sparse = forward._model.config.sparse
    made: Any = object.__new__(executor_module(monkeypatch).CudaExecutor)
    made._forward, made._screened, made._row_counts = forward, set(), (1, 2)
    made._row_kinds = {count: forward.row_kinds(count) for count in made._row_counts}
    made._lengths, found = Lengths((), sparse.dense_context if sparse else 0), []
    made._lengths.add(Prefill(1, (7,) * prompt, 0, True))
    for _ in range(steps):
        made._lengths.add(Decode((1,)))
        rows, kind, is_screened = made._decode_form((1,))
        assert (rows, is_screened) == (1, False)
        found.append(kind)
    return found


def masked_kinds(monkeypatch: pytest.MonkeyPatch, prompt: int, steps: Sequence[Decode]) -> list[tuple[int, RowKind]]:
    """Return the row count and the kind of each graph that the executor runs for these steps under masks."""
    made: Any = object.__new__(executor_module(monkeypatch).CudaExecutor)
    forward, found = forward_of(EIGHT_B), list[tuple[int, RowKind]]()
    made._row_counts, made._masked_counts, made._num_logprobs, made._lengths = (1, 2), (1, 2, 4), {}, Lengths(())
    made._row_kinds = {count: forward.row_kinds(count) for count in made._row_counts}
    made._rings = SimpleNamespace(write_certain=lambda *_: None, next_number=1, sent=lambda *_: None)
    run_decode = lambda rows, kind: found.append((rows, kind))  # noqa: E731
    made.__dict__["_masked"] = SimpleNamespace(masks=SimpleNamespace(write=lambda *_: None), run_decode=run_decode)
    made._lengths.add(Prefill(1, (7,) * prompt, 0, True))
    for step in steps:
        made._lengths.add(step)
        made._submit_masked(step)
    return found


def test_a_row_under_a_mask_is_short_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row under a mask is short as any other, but several rows of a sequence, which bring certain tokens, are of no
    kind."""
    steps = [Decode((1,), masks=(Mask(),))] * 3
    assert masked_kinds(monkeypatch, SHORT_KEYS - 2, steps) == [(1, SHORT), (1, SHORT), (1, ANY_ROWS)]
    steps = [Decode((1,), masks=(Mask(),), certain=((5, 6),)), Decode((1,), masks=(Mask(),), certain=((),))]
    assert masked_kinds(monkeypatch, 9, steps) == [(4, ANY_ROWS), (1, SHORT)]


@pytest.mark.parametrize("masks", [None, TreeMasks()], ids=["plain", "masked"])
def test_a_tree_is_of_the_kind_of_its_deepest_node(monkeypatch: pytest.MonkeyPatch, masks: TreeMasks | None) -> None:
    """A tree has the kind of its deepest node, and may be screened if few tokens can be chosen in all of its slots."""
    made: Any = object.__new__(executor_module(monkeypatch).CudaExecutor)
    shapes, limit, found = (TreeShape.chain(3),), SPARSE["dense_len"] - 1, list[tuple[RowKind, bool]]()
    made._forward, made._lengths = forward_of(EIGHT_B, sparse=SPARSE, draft="lookup"), Lengths(shapes, limit)
    made._screened, made._num_logprobs = {1, 2}, {}

    def speculate(graphs: Any, step: Any, num_logprobs: Any, kind: RowKind, *, may_screen: bool) -> None:
        found.append((kind, may_screen))

    made._graphs, made._speculation = None, SimpleNamespace(speculate=speculate)
    for slot in (1, 2, 3):
        made._lengths.add(Prefill(slot, (7,) * (limit - 8), 0, True))
    for slots in ((1,), (1,), (1,), (1, 2), (2, 3)):
        step = Speculate(slots, 0, masks)
        made._lengths.add(step)
        made._submit_speculate(step)
    assert found == [(DENSE, True), (DENSE, True), (ANY_ROWS, True), (ANY_ROWS, True), (DENSE, False)]


def test_graphs_under_masks_are_captured_for_all_kinds_at_once() -> None:
    """Graphs under masks are captured for all kinds at once: a later capture could wait for a device that awaits
    masks."""
    captured, run, launched, prepared = list[Any](), list[Any](), list[Any](), list[int]()
    graphs: Any = SimpleNamespace(add=lambda key, launch: captured.append(launch), run=run.append)
    decode = lambda *form: launched.append(form)  # noqa: E731
    masked = MaskedGraphs(graphs, None, prepared.append, {1: (SHORT, ANY_ROWS)}, decode, lambda: None)  # type: ignore[arg-type]
    for rows, kind in ((1, SHORT), (1, ANY_ROWS), (4, ANY_ROWS), (1, SHORT)):
        masked.run_decode(rows, kind)
    for launch in captured:
        launch()
    assert launched == [(1, SHORT), (1, ANY_ROWS), (4, ANY_ROWS)] and prepared == [1, 4]
    assert run == [("masked", 1, SHORT), ("masked", 1, ANY_ROWS), ("masked", 4, ANY_ROWS), ("masked", 1, SHORT)]


@pytest.mark.parametrize(("settings", "rows"), [
    ({}, 0), ({"lm_head_screen": True}, 1), ({"lm_head_screen": True, "max_sequences": 20}, 32),
    ({"lm_head_screen": True, "max_sequences": 64}, 32), ({"lm_head_screen": True, "draft": "lookup"}, 32),
])  # fmt: skip
def test_up_to_how_many_rows_a_head_is_screened(settings: dict[str, Any], rows: int) -> None:
    forward = forward_of(EIGHT_B, **settings)
    screened = [count for count in range(1, 65) if forward.screenings(count) == (False, True)]
    assert screened == list(range(1, rows + 1))
    assert all(forward.screenings(count) == (False,) for count in range(rows + 1, 65))


def test_a_row_is_short_until_it_has_more_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row counts its own token among its keys; with sparse attention the last short row ends a window of compressed
    keys."""
    found = chosen(monkeypatch, forward_of(EIGHT_B), SHORT_KEYS - 2, 4)
    assert found == [SHORT, SHORT, ANY_ROWS, ANY_ROWS]
    found = chosen(monkeypatch, forward_of(EIGHT_B, sparse=SPARSE), SHORT_KEYS - 3, 5)
    assert found == [SHORT_DENSE, SHORT_DENSE, ANY_ROWS, INSIDE_DENSE, INSIDE_DENSE]
