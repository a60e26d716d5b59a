"""Decode steps that the host knows to have short rows only, and the kernels that a start compiles for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, TreeShape
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.ops.linear import PRODUCTS
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.cuda.step.lengths import Lengths
from cpmrt.executor import Decode, Prefill, Release, SlotResult, Speculate, StepResult
from cpmrt.opening import described
from cpmrt.ops import SHORT_KEYS, RowKind
from cpmrt.weights.model_folder import ModelFolder


@dataclass(frozen=True)
class Known:
    """A pending step whose result is already known."""

    result: StepResult

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


def test_every_step_adds_the_tokens_that_it_may_bring() -> None:
    lengths = Lengths((TreeShape(2, 4, 12), TreeShape(5, 1, 6), TreeShape(1, 4, 2, lookup_length=11)))
    assert lengths.of(0) == lengths.of(3) == 0
    lengths.add(Prefill(3, (7,) * 64, 0, False))
    lengths.add(Prefill(3, (7,) * 10, 64, True))
    assert lengths.of(3) == 74
    lengths.add(Decode((3, 1)))
    lengths.add(Decode((1, 3), certain=((), (5, 6))))
    assert (lengths.of(3), lengths.of(1)) == (78, 2)
    lengths.add(Speculate((3,), 1))
    lengths.add(Speculate((1,)))
    lengths.add(Release(3))
    assert (lengths.of(3), lengths.of(1)) == (84, 5)
    lengths.add(Prefill(3, (1, 2), 0, True))
    assert lengths.of(3) == 2
    lengths.add(Speculate((3,), 2))
    assert lengths.of(3) == 14


def test_rows_are_short_or_long_together() -> None:
    """A step is short or long only if all its rows are; padding rows are short. Here slots 0 to 3 are short, 4 to 7
    long."""
    lengths = Lengths(())
    for slot in range(8):
        lengths.add(Prefill(slot, (7,) * (SHORT_KEYS + (slot >= 4)), 0, True))
    assert lengths.are(RowKind("short"), (0,), 1) and lengths.are(RowKind("short"), (0, 1, 2), 4)
    assert not lengths.are(RowKind("short"), (4,), 1) and not lengths.are(RowKind("short"), (0, 1, 4), 4)
    assert lengths.are(RowKind("long"), (4, 5, 6, 7), 4)
    assert not lengths.are(RowKind("long"), (4, 5, 6), 4) and not lengths.are(RowKind("long"), (3, 4, 5, 6), 4)


def test_what_was_drafted_counts_until_it_is_known_what_came() -> None:
    lengths, step = Lengths((TreeShape(2, 4, 12),)), Speculate((3, 5))
    lengths.add(Prefill(3, (7,) * 10, 0, True))
    lengths.add(Prefill(5, (7,) * 20, 0, True))
    results = [StepResult((SlotResult((1, 2)), SlotResult((3,)))), StepResult((SlotResult((4, 5, 6)), SlotResult()))]
    followed = []
    for result in results:
        lengths.add(step)
        followed.append(lengths.followed(step, Known(result)))
    assert (lengths.of(3), lengths.of(5)) == (16, 26)
    assert followed[0].is_done() and followed[0].wait() is followed[0].wait() is results[0]
    assert (lengths.of(3), lengths.of(5)) == (15, 24)
    lengths.add(Prefill(5, (7,) * 8, 0, True))
    followed[1].wait()
    assert (lengths.of(3), lengths.of(5)) == (15, 8), "the second was of another sequence"


def test_rows_are_inside_windows_where_no_multiple_of_sixteen_is_reached() -> None:
    lengths, found = Lengths(()), []
    lengths.add(Prefill(0, (7,) * 30, 0, True))
    for certain in ((), (), (), (5,) * 13, (), (5,), ()):
        lengths.add(Decode((0,), certain=(certain,)))
        found.append((lengths.of(0), lengths.are(RowKind(is_inside=True), (0,), 1)))
    assert found == [(31, True), (32, False), (33, True), (47, True), (48, False), (50, True), (51, True)]
    drafting = Lengths((TreeShape(2, 4, 12),))
    drafting.add(Prefill(0, (7,) * 30, 0, True))
    drafting.add(Decode((0,)))
    assert not drafting.are(RowKind(is_inside=True), (0,), 1), "a step before it may have accepted fewer"


def test_rows_are_dense_as_long_as_none_can_have_to_choose() -> None:
    dense, both = RowKind(is_dense=True), RowKind(is_inside=True, is_dense=True)
    lengths = Lengths((TreeShape(2, 4, 12),), 100)
    lengths.add(Prefill(0, (7,) * 98, 0, True))
    lengths.add(Prefill(1, (7,) * 100, 0, True))
    assert lengths.are(dense, (0, 1), 2) and not lengths.are(both, (0, 1), 2)
    lengths.add(Speculate((0,)))
    assert not lengths.are(dense, (0,), 1), "three tokens may have come"
    lengths.add(Decode((1,)))
    assert not lengths.are(dense, (1,), 1)
    plain = Lengths((), 100)
    plain.add(Prefill(0, (7,) * 96, 0, True))
    assert not plain.are(both, (0,), 1) and plain.are(dense, (0,), 1)
    plain.add(Decode((0,)))
    assert plain.are(both, (0,), 1)


def compiled_for(folder: Path, shape: str, arch: str, **changes: Any) -> list[tuple[str, Any]]:
    """Return the modules that a start with a model of this shape compiles."""
    (folder / "config.json").write_text(json.dumps(shape_config(shape) | changes))
    device, model = known_device(arch), ModelFolder.open(str(folder), weights=False)
    blueprint = described(model, EngineConfig(load_format="dummy", max_context=4096), CudaTarget(device), None, "auto")
    return list(modules_of(blueprint, device))


@pytest.mark.parametrize(("shape", "changes", "arch", "kernel"), [
    ("minicpm4-0.5b", {"quantization_config": gptq_config()}, "sm_90", "qkv_attention"),
    ("minicpm4-0.5b", {}, "sm_90", "linear_qkv_attention"),
    ("minicpm4-0.5b", {}, "sm_80", None),
    ("minicpm5-1b", {"quantization_config": gptq_config()}, "sm_90", None),
])  # fmt: skip
def test_a_start_compiles_the_kernel_of_short_rows(
    tmp_path: Path, shape: str, changes: dict[str, Any], arch: str, kernel: str | None
) -> None:
    modules = compiled_for(tmp_path, shape, arch, num_hidden_layers=1, **changes)
    found = [file for file, _ in modules if file.endswith("qkv_attention.cu")]
    assert found == ([f"attention/{kernel}.cu"] if kernel else [])


@pytest.mark.parametrize(("shape", "arch", "attends"), [
    ("minicpm4-8b", "sm_89", [True]),
    ("minicpm4-0.5b", "sm_86", [True]),
    ("minicpm4-0.5b", "sm_90", []),
    ("minicpm4-8b", "sm_87", []),
])  # fmt: skip
def test_a_start_compiles_the_kernel_of_all_layers(tmp_path: Path, shape: str, arch: str, attends: list[bool]) -> None:
    """A start compiles the kernel of all layers where there is one: below sm_90, with enough multiprocessors."""
    modules = compiled_for(tmp_path, shape, arch, num_hidden_layers=2, quantization_config=gptq_config())
    found = [constants for file, constants in modules if file.endswith("row_layers.cu")]
    assert {bool(constants["ATTENDS"]) for constants in found} == set(attends)


def test_all_weights_come_ahead_only_behind_the_attention_of_a_short_row(tmp_path: Path) -> None:
    modules = compiled_for(tmp_path, "minicpm4-0.5b", "sm_90", num_hidden_layers=1)
    of_row = [sizes for file, sizes in modules if file == "linear/linear.cu" and "ONE_ROW" in sizes]
    found = {(sizes["LINEAR"], sizes["IN_FEATURES"], sizes.get("HELD_CHUNKS")) for sizes in of_row}
    residual, gate_up = PRODUCTS["residual"], PRODUCTS["gate_up"]
    short = {(residual, 1024, 0), (gate_up, 1024, 2), (residual, 4096, 2)}
    long = {(product, columns, None) for product, columns, _ in short}
    assert {each for each in found if each[0] in (residual, gate_up)} == short | long
