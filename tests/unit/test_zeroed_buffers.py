"""What kernels expect to be zero before the first step is zero then, whatever the memory held before."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.build.source import kernels_folder
from cpmrt.cuda.draft.memory import tree_tables
from cpmrt.cuda.kernels import files
from cpmrt.cuda.precompile import known_device
from cpmrt.cuda.step.memory import cuda_needs
from cpmrt.memory.plan import make_plan
from cpmrt.models.decoder import cache_layout
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import BufferSpec

SAYS_SO = re.compile(r"\bzero before the\s+(?://\s+)?first launch|arrivals \(tiles\) int32, zero")
BUFFER_OF = {
    "attention/decode_attention.cu": "attention_arrivals", "attention/selected_attention.cu": "attention_arrivals",
    "attention/tree_attention.cu": "attention_arrivals", "experts/experts_row.cu": "expert_words",
    "linear_packed/linear_packed.cu": "packed_arrivals",
}  # fmt: skip
"""The kernels whose headers ask for zeros before the first launch, and the buffer that each gets in the executor."""
CONTEXT = 4096


def buffers(shape: str, arch: str = "sm_90") -> dict[str, BufferSpec]:
    """Return the buffers of a model of this shape in 4 bits, by name."""
    config = ModelConfig.from_hf(shape_config(shape) | {"quantization_config": gptq_config(128)})
    engine = EngineConfig(max_context=CONTEXT, max_sequences=8)
    needs = cuda_needs(config, engine, weight_specs(config, engine), known_device(arch))
    return {spec.name: spec for spec in (*needs.tables(CONTEXT), *needs.workspace)}


def test_every_kernel_that_asks_for_zeros_is_listed() -> None:
    asking = {file for file in files() if SAYS_SO.search((kernels_folder() / file).read_text())}
    assert asking == set(BUFFER_OF)


@pytest.mark.parametrize(
    ("shape", "arch"), [("minicpm4-8b", "sm_90"), ("minicpm-moe-8x2b", "sm_90"), ("minicpm4-8b", "sm_87")]
)
def test_buffers_in_which_kernels_count_are_zeroed(shape: str, arch: str) -> None:
    found = buffers(shape, arch)
    counted = {*BUFFER_OF.values(), "packed_counter", "screen_counters", "token_counts", "slot_states", "step_context"}
    assert not [name for name in counted & set(found) if not found[name].zeroed]
    assert {"attention_arrivals", "token_counts"} <= set(found)
    assert ("expert_words" in found) == (shape == "minicpm-moe-8x2b")


def test_all_buffers_of_trees_are_zeroed() -> None:
    assert all(spec.zeroed for spec in tree_tables(4, CONTEXT, 64, 128))


def test_a_plan_keeps_which_regions_are_zeroed() -> None:
    def spec(name: str, **given: Any) -> BufferSpec:
        return BufferSpec(name, (4,), 0, 1, np.int32, **given)

    config, engine = ModelConfig.from_hf(shape_config("minicpm4-0.5b")), EngineConfig()
    caches = cache_layout(config, CONTEXT, 1, engine.kv_dtype)
    tables, workspace = [spec("a", zeroed=True), spec("b")], [spec("c", zeroed=True), spec("d")]
    plan = make_plan((), tables, workspace, caches, itemsize=2)
    assert {region.name for region in plan.regions if region.zeroed} == {"a", "c"}
