"""Quantised weights in the plan of the CUDA executor: sizes, shared memory, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.bench.shapes import blocks_config, shape_config
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.load.repack import takes_blocks, waves
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, packed_layout
from cpmrt.cuda.ops.linear_packed.products import UNPACKED_BYTES, held_weights, slice_rows
from cpmrt.cuda.precompile import known_device
from cpmrt.cuda.step.memory import cuda_needs
from cpmrt.errors import ConfigError, UnsupportedModelError
from cpmrt.memory.plan import MemoryPlan
from cpmrt.models.planning import plan_model, weight_specs
from cpmrt.tensor_spec import Packing, Quantization, Source, TensorSpec
from cpmrt.weights.formats.blocks import BLOCK_TYPES
from cpmrt.weights.gguf.specs import unpaired

DEVICE = known_device("sm_90")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def plan_of(shape: str = "minicpm4-8b", head_bits: int | None = None, **changes: Any) -> MemoryPlan:
    sizes = changes.pop("sizes", {})
    config = ModelConfig.from_hf(shape_config(shape) | sizes | {"quantization_config": GPTQ | changes})
    engine = EngineConfig(lm_head_bits=head_bits, max_context=4096)
    specs = weight_specs(config, engine)
    needs = cuda_needs(config, engine, specs, DEVICE)
    return plan_model(config, engine, itemsize=2, max_context=4096, needs=needs, specs=specs)


@pytest.mark.parametrize("head_bits", [4, 8])
def test_a_packed_weight_has_its_codes_and_scales_in_one_region(head_bits: int) -> None:
    plan = plan_of(head_bits=head_bits)
    for spec in plan.tensors:
        if spec.quant is not None:
            assert plan.region(f"{spec.name}.codes").nbytes == packed_layout(spec, DEVICE).num_bytes
            assert spec.num_bytes(2) <= plan.region(f"{spec.name}.codes").nbytes < 1.01 * spec.num_bytes(2)
    names = {region.name for region in plan.regions}
    assert "lm_head.codes" in names and "layers.0.qkv" not in names and "layers.0.qkv.perm" not in names


def test_loading_shares_its_memory_with_the_steps_that_come_after_it() -> None:
    plan = plan_of()
    staging, codes = plan.region("staging"), plan.region("layers.0.down.codes")
    assert staging.nbytes >= codes.nbytes
    workspace = [region for region in plan.regions if region.part == "workspace"]
    assert staging.offset == min(region.offset for region in workspace)
    assert plan.part_bytes["workspace"] < plan.workspace_unshared_bytes - staging.nbytes // 2


@pytest.mark.parametrize("order", [False, True])
def test_columns_in_another_order_need_buffers(order: bool) -> None:
    plan = plan_of(desc_act=order)
    names = {region.name for region in plan.regions}
    assert ({"packed_permuted", "packed_permuted_inner", "layers.0.down.perm"} <= names) is order
    arrays = {region.name: np.broadcast_to(np.uint16(0), region.shape) for region in plan.regions}
    held = held_weights(plan.tensors, arrays, DEVICE)
    assert len(held) == 4 * 32 and (held["layers.3.output"].perm is not None) is order
    assert held["layers.0.gate_up"].shape == (32768, 4096) and not held["layers.0.gate_up"].layout.zeros


def test_a_model_that_is_not_quantised_needs_nothing() -> None:
    config = ModelConfig.from_hf(shape_config("minicpm4-8b"))
    engine = EngineConfig()
    needs = cuda_needs(config, engine, weight_specs(config, engine), DEVICE)
    names = [buffer.name for buffer in (*needs.workspace, *needs.tables(128))]
    assert not [name for name in names if name.startswith(("packed", "staging"))]


def test_what_the_kernels_do_not_take_is_refused_in_the_plan() -> None:
    with pytest.raises(UnsupportedModelError, match="columns that the kernels do not take.*multiple of 128"):
        plan_of("minicpm4-0.5b", sizes={"intermediate_size": 4160}, group_size=64)


@given(st.integers(1, 5000), st.integers(1, 256))
def test_slices_are_even_and_bounded(rows: int, columns: int) -> None:
    num_rows, num_columns = 16 * rows, 128 * columns
    step = slice_rows(num_rows, num_columns)
    assert 0 < step <= num_rows and (step % 256 == 0 or step == num_rows)
    assert 2 * step * num_columns <= max(UNPACKED_BYTES, 512 * num_columns) or step == num_rows <= 256


def test_slices_of_known_weights() -> None:
    assert [slice_rows(*shape) for shape in ((4608, 4096), (32768, 4096), (4096, 16384))] == [4608, 8192, 2048]


GGUF_WIDTHS = {
    "Q4_0": (4, 32, 0), "Q4_1": (4, 32, MINIMUMS), "Q5_0": (8, 32, 0), "Q5_1": (8, 32, MINIMUMS), "Q8_0": (8, 32, 0),
    "Q2_K": (4, 16, MINIMUMS), "Q3_K": (4, 16, 0), "Q4_K": (4, 32, MINIMUMS), "Q5_K": (8, 32, MINIMUMS),
    "Q6_K": (8, 16, 0), "IQ4_NL": (8, 32, 0), "IQ4_XS": (8, 32, 0), "TQ1_0": (2, 128, 0), "TQ2_0": (2, 128, 0),
}  # fmt: skip


def blocks_plan(name: str, **changes: Any) -> MemoryPlan:
    config = ModelConfig.from_hf(shape_config("minicpm4-8b") | {"quantization_config": blocks_config(name)} | changes)
    engine = EngineConfig(max_context=4096)
    specs = weight_specs(config, engine)
    needs = cuda_needs(config, engine, specs, DEVICE)
    return plan_model(config, engine, itemsize=2, max_context=4096, needs=needs, specs=specs)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_keep_their_codes_in_the_next_width(name: str) -> None:
    plan = blocks_plan(name)
    held = [spec for spec in plan.tensors if spec.quant is not None]
    layouts = {packed_layout(spec, DEVICE) for spec in held}
    assert {(layout.bits, layout.scale_group, layout.zeros) for layout in layouts} == {GGUF_WIDTHS[name]}
    assert len(held) == 4 * 32 + 1
    assert all(takes_blocks(spec) for spec in held)
    staging = plan.region("staging").nbytes
    assert staging >= max(piece.end_byte for wave in waves(held, staging) for piece in wave)


def test_a_mixture_has_wide_matrices_where_llama_cpp_has_them() -> None:
    plan = blocks_plan("Q4_K_M", num_hidden_layers=16)
    layouts = {spec.name: packed_layout(spec, DEVICE) for spec in plan.tensors if spec.quant is not None}
    wide = [layer for layer in range(16) if layouts[f"layers.{layer}.down"].bits == 8]
    assert wide == [0, 1, 4, 7, 10, 13, 14, 15]
    assert wide == [layer for layer in range(16) if layouts[f"layers.{layer}.qkv"].bits == 8]
    assert {layouts[f"layers.{layer}.gate_up"].bits for layer in range(16)} == {4}
    assert layouts["lm_head"].bits == 8 and layouts["layers.0.qkv"].zeros == MINIMUMS
    with pytest.raises(ConfigError, match=r"type of GGUF blocks: expected .*Q4_K_M, got 'Q9'"):
        blocks_plan("Q9")
    with pytest.raises(ConfigError, match="q_proj.weight: columns: expected a multiple of 256, got 384"):
        blocks_plan("Q4_K", hidden_size=384)


def test_rows_in_pairs_are_those_of_heads() -> None:
    pairs = unpaired(256, 64)
    packing = Packing("Q4_0", 32, symmetric=True, row_bytes=72)
    quant = Quantization(4, 32, in_blocks=True)
    source = Source("q", (256, 128), packing, pairs)
    spec = TensorSpec("qkv", (256, 128), (source,), quant, "qkv", head_dim=64)
    assert takes_blocks(spec)
    assert not takes_blocks(replace(spec, head_dim=32)) and not takes_blocks(replace(spec, product="residual"))
    assert not takes_blocks(replace(spec, product=None)) and not takes_blocks(replace(spec, num_experts=2))
    assert not takes_blocks(replace(spec, shape=(256, 96)))
    others = tuple(replace(source, packing=other) for other in (None, replace(packing, format="gptq")))
    assert not any(takes_blocks(replace(spec, sources=(other,))) for other in others)
