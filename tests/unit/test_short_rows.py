"""Which decode steps are of short rows, as far as the host knows, and what a start compiles for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, TreeShape
from cpmrt.cuda.assembly import CudaTarget
from cpmrt.cuda.precompile import known_device, modules_of
from cpmrt.cuda.step.lengths import Lengths
from cpmrt.executor import Decode, Prefill, Release, Speculate
from cpmrt.opening import described
from cpmrt.ops import SHORT_KEYS
from cpmrt.weights.model_folder import ModelFolder


def test_every_step_adds_the_tokens_that_it_may_bring() -> None:
    lengths = Lengths((TreeShape(2, 4, 12), TreeShape(5, 1, 6), TreeShape(1, 4, 2, lookup_length=11)))
    assert lengths.are_within((0, 3), 0)
    lengths.add(Prefill(3, (7,) * 64, 0, False))
    lengths.add(Prefill(3, (7,) * 10, 64, True))
    assert lengths.are_within((3,), 74) and not lengths.are_within((3,), 73)
    lengths.add(Decode((3, 1)))
    lengths.add(Decode((1, 3), certain=((), (5, 6))))
    assert lengths.are_within((3,), 78) and not lengths.are_within((3,), 77) and lengths.are_within((1,), 2)
    lengths.add(Speculate((3,), 1))
    lengths.add(Speculate((1,)))
    lengths.add(Release(3))
    assert lengths.are_within((1, 3), 84) and not lengths.are_within((1, 3), 83) and lengths.are_within((1,), 5)
    lengths.add(Prefill(3, (1, 2), 0, True))
    assert lengths.are_within((3,), 2)
    lengths.add(Speculate((3,), 2))
    assert lengths.are_within((3,), 14) and not lengths.are_within((3,), 13)


def test_rows_are_short_or_long_together() -> None:
    """Slots 0 to 3 are short, 4 to 7 long; a step that is padded has short rows in any case."""
    lengths = Lengths(())
    for slot in range(8):
        lengths.add(Prefill(slot, (7,) * (SHORT_KEYS + (slot >= 4)), 0, True))
    assert lengths.are("short", (0,), 1) and lengths.are("short", (0, 1, 2), 4)
    assert not lengths.are("short", (4,), 1) and not lengths.are("short", (0, 1, 4), 4)
    assert lengths.are("long", (4, 5, 6, 7), 4)
    assert not lengths.are("long", (4, 5, 6), 4) and not lengths.are("long", (3, 4, 5, 6), 4)


def compiled_for(folder: Path, shape: str, arch: str, **changes: Any) -> list[tuple[str, Any]]:
    """The modules of a start with a model of this shape."""
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
    """Where there is one: below sm_90, with multiprocessors enough."""
    modules = compiled_for(tmp_path, shape, arch, num_hidden_layers=2, quantization_config=gptq_config())
    found = [constants for file, constants in modules if file.endswith("row_layers.cu")]
    assert {bool(constants["ATTENDS"]) for constants in found} == set(attends)
