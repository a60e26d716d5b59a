"""Quantised weights: checkpoints that contradict their settings, heads rounded at load, specs and plans."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.quantised_models import CASES, QuantisedCase, Tensors, raw_tensors, write_quantised, write_safetensors
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.config import EngineConfig, ModelConfig, SamplingParams
from cpmrt.dtypes import DType, round_to
from cpmrt.errors import CheckpointError, ConfigError, CpmrtError, UnsupportedModelError
from cpmrt.memory.arena import Arena
from cpmrt.memory.packed_regions import PackedRegion
from cpmrt.models.planning import ExecutorNeeds, fit_model, plan_model, weight_specs
from cpmrt.ops import QuantizedWeight
from cpmrt.reference.quantized import dequantized
from cpmrt.tensor_spec import Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import fill_dummy_quantised
from cpmrt.weights.quantised import load_quantised, round_to_nearest

BY_NAME = {case.name: case for case in CASES}
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[Tensors], object]


def remove(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def words(name: str, change: Callable[[Any], Any], dtype: str | None = None) -> Change:
    def apply(tensors: Tensors) -> None:
        stored, values = tensors[name]
        tensors[name] = (dtype or stored, np.ascontiguousarray(change(values)))

    return apply


def add(name: str, dtype: str, values: Any) -> Change:
    return lambda tensors: tensors.update({name: (dtype, values)})


def at(index: Any, value: Any) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values = values.copy()
        values[index] = value
        return values

    return change


# Each: the case, settings that replace its own, the change of its tensors, the error's text.
CONTRADICTIONS: list[tuple[str, dict[str, Any], Change | None, str]] = [
    ("gptq", {"group_size": 64}, None, f"wrong: '{Q}.scales' (expected [2, 128], got [1, 128])"),
    ("gptq", {"group_size": -1}, None, "'model.layers.0.mlp.down_proj.scales' (expected [1, 128], got [2, 128])"),
    ("gptq", {"checkpoint_format": "gptq_v2"}, None, f"'{Q}.qzeros' contradicts the symmetric quantisation"),
    ("gptq_asymmetric", {"sym": True}, None, "expected zero points of 8"),
    ("auto_round_awq", {"sym": True}, None, "correct sym (or zero_point) or checkpoint_format"),
    ("gptq", {}, remove(f"{Q}.qweight"), f"'{Q}.weight'"),
    ("gptq", {}, remove(f"{Q}.scales"), f"1 missing: '{Q}.scales'"),
    ("gptq", {}, remove(f"{Q}.qzeros"), f"1 missing: '{Q}.qzeros'"),
    ("gptq", {}, words(f"{Q}.qweight", lambda w: w.T), f"'{Q}.qweight' (expected [16, 128], got [128, 16])"),
    ("gptq", {}, words(f"{Q}.qweight", lambda w: w[:8]), f"'{Q}.qweight' (expected [16, 128], got [8, 128])"),
    ("gptq", {}, words(f"{Q}.qweight", lambda w: np.tile(w, (2, 1))), f"'{Q}.qweight' (expected [16, 128], got [32"),
    ("gptq", {}, words(f"{Q}.qweight", lambda w: w.view(np.float32), "F32"), "(expected I32, got F32)"),
    ("gptq", {}, words(f"{Q}.scales", lambda s: s.view(np.int16), "I16"), "(expected F32 | F16 | BF16, got I16)"),
    ("gptq", {}, words(f"{Q}.qzeros", lambda z: z[:, :8]), f"'{Q}.qzeros' (expected [1, 16], got [1, 8])"),
    ("gptq", {}, words(f"{Q}.scales", at((0, 5), np.inf)), f"'{Q}.scales' has scales that are not finite"),
    ("gptq", {}, words(f"{Q}.scales", at((0, 5), np.nan)), f"'{Q}.scales' has scales that are not finite"),
    ("gptq", {}, words(f"{Q}.g_idx", at(3, 1)), f"'{Q}.g_idx': expected groups in [0, 1), got 0 to 1"),
    ("gptq", {}, words(f"{DOWN}.g_idx", at(3, -1)), f"'{DOWN}.g_idx': expected groups in [0, 2), got -1 to 1"),
    ("gptq", {}, words(f"{DOWN}.g_idx", at(3, 2**31 - 1)), "got 0 to 2147483647"),
    ("gptq", {}, words(f"{DOWN}.g_idx", at(3, 1)), "expected 128 columns in every group, got 127 to 129"),
    ("gptq", {}, words(f"{Q}.g_idx", lambda g: g[:64]), f"'{Q}.g_idx' (expected [128], got [64])"),
    ("gptq", {}, words(f"{Q}.g_idx", lambda g: g.astype(np.int64), "I64"), "(expected I32, got I64)"),
    ("gptq", {}, add(f"{Q}.weight", "F16", np.zeros((128, 128), np.float16)), f"'{Q}' is there twice"),
    ("gptq", {}, add(f"{Q}.bias", "F16", np.ones(128, np.float16)), f"1 unexpected: '{Q}.bias'"),
    ("gptq", {}, add(f"{Q}.weight_packed", "I32", np.zeros((128, 16), np.int32)), "1 unexpected"),
    ("gptq", AWQ := {"quant_method": "awq", "version": "gemm"}, None, f"'{Q}.qweight' (expected [128, 16], got [16"),
    ("gptq_row", {"lm_head": False}, words("lm_head.scales", lambda s: s[:, :8]), "'lm_head.scales' (expected"),
    ("gptq_dynamic", {"dynamic": {}}, None, "o_proj.scales' (expected [1, 128], got [4, 128])"),
    ("awq", {}, remove(f"{DOWN}.qzeros"), f"1 missing: '{DOWN}.qzeros'"),
    ("awq", {"quant_method": "gptq", "checkpoint_format": "gptq"}, None, f"'{Q}.qweight' (expected [16, 128], got"),
    (
        "compressed",
        {},
        words(f"{Q}.weight_shape", at(0, 64)),
        f"'{Q}.weight_shape': expected [128, 128], got [64, 128]",
    ),
    ("compressed", {}, words(f"{Q}.weight_shape", lambda s: s[:1]), f"'{Q}.weight_shape' (expected [2], got [1])"),
    ("compressed", {}, add(f"{Q}.weight_zero_point", "I32", np.zeros((16, 1), np.int32)), "1 unexpected"),
    ("compressed_asymmetric", {}, words(f"{Q}.weight_zero_point", lambda z: z.T), "(expected [16, 4], got [4, 16])"),
    ("compressed_asymmetric", {}, words(f"{Q}.weight_g_idx", at(0, 99)), "'" + Q + ".weight_g_idx': expected groups"),
    ("compressed", AWQ | {"bits": 4, "group_size": 128}, None, f"'{Q}.weight_packed' contradicts quantization_config"),
    ("marlin", {"sym": False}, None, "has no zero points: expected sym true"),
    ("marlin", {"group_size": 64}, None, "qkv_proj.scales' (expected [2, 256], got [1, 256])"),
    ("marlin", {}, remove("model.layers.0.self_attn.qkv_proj.scales"), "1 missing: "),
    ("marlin", {}, add(f"{Q}.weight", "F16", np.zeros((128, 128), np.float16)), f"1 unexpected: '{Q}.weight'"),
]


@pytest.mark.parametrize(("name", "settings", "change", "expected"), CONTRADICTIONS)
def test_a_contradiction_is_refused(
    name: str, settings: dict[str, Any], change: Change | None, expected: str, tmp_path: Path
) -> None:
    folder = write_quantised(BY_NAME[name], tmp_path / "model", 0, **settings)
    if change is not None:
        tensors = raw_tensors(BY_NAME[name], 0)
        change(tensors)
        write_safetensors(folder / BY_NAME[name].file, tensors)
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, executor="reference")
    assert expected in str(caught.value) and str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", quantization_config=BY_NAME["gptq"].settings)
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with pytest.raises(UnsupportedModelError, match=r"q_proj'.*a multiple of group_size \(128\), got 64"):
        weight_specs(config, EngineConfig())
    with pytest.raises(UnsupportedModelError, match="lm_head': rows of a quantised weight: expected a multiple of 8"):
        weight_specs(config_of("gptq", vocab_size=99, settings={"lm_head": True}), EngineConfig())


def test_biases_of_zeros_are_leftovers(tmp_path: Path) -> None:
    tensors = raw_tensors(BY_NAME["gptq"], 0)
    tensors[f"{Q}.bias"] = ("F16", np.zeros(128, np.float16))
    folder = write_quantised(BY_NAME["gptq"], tmp_path / "model", 0)
    write_safetensors(folder / "model.safetensors", tensors)
    LLM(folder, executor="reference").close()


def test_an_order_that_was_never_set_is_none(tmp_path: Path) -> None:
    tensors = raw_tensors(BY_NAME["compressed"], 0)
    tensors[f"{Q}.weight_g_idx"] = ("I32", np.full(128, -1, np.int32))
    folder = write_quantised(BY_NAME["compressed"], tmp_path / "model", 0)
    write_safetensors(folder / "model.safetensors", tensors)
    with LLM(folder, executor="reference") as llm:
        assert not any(spec.quant and spec.quant.permuted for spec in llm.plan.tensors)


def test_weights_without_their_settings(tmp_path: Path) -> None:
    folder = write_quantised(BY_NAME["gptq"], tmp_path / "model", 0)
    (folder / "config.json").write_text(json.dumps(BY_NAME["gptq"].config))
    with pytest.raises(UnsupportedModelError, match=r"quantised \(GPTQ\), and config.json does not say how"):
        LLM(folder, executor="reference")


def config_of(name: str, settings: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    case = BY_NAME[name]
    quantization = case.settings | (settings or {})
    return ModelConfig.from_hf(case.config | {"quantization_config": quantization} | changes)


def specs_of(case: QuantisedCase, folder: Path) -> dict[str, TensorSpec]:
    write_quantised(case, folder, 0)
    with Checkpoint.open(folder) as checkpoint:
        return {spec.name: spec for spec in weight_specs(config_of(case.name), EngineConfig(), checkpoint)}


@pytest.mark.parametrize(("name", "expected"), [
    ("gptq", {"layers.0.qkv": Quantization(4, 128), "layers.1.down": Quantization(4, 128), "lm_head": None}),
    ("gptq_row", {"layers.0.down": Quantization(4, 256), "layers.0.qkv_bias": None, "lm_head": Quantization(4, 128)}),
    ("gptq_dynamic", {"layers.0.output": Quantization(4, 32), "layers.0.gate_up": None,
                      "layers.1.gate_up": Quantization(4, 128)}),
    ("gptq_v2_act_order", {"layers.0.qkv": Quantization(4, 32, False, True)}),
    ("gptq_orders_apart", {"layers.0.qkv": None, "layers.0.gate_up": None,
                           "layers.0.output": Quantization(4, 64, True, True)}),
    ("awq_some", {"layers.0.output": None, "layers.0.gate_up": Quantization(4, 64, False), "layers.1.down": None}),
    ("marlin", {"layers.0.qkv": Quantization(4, 128), "layers.1.gate_up": Quantization(4, 128)}),
])  # fmt: skip
def test_how_weights_are_held(name: str, expected: dict[str, Quantization | None], tmp_path: Path) -> None:
    specs = specs_of(BY_NAME[name], tmp_path)
    assert {key: specs[key].quant for key in expected} == expected
    assert specs["embed_tokens"].quant is None


def test_settings_and_tensors_agree_on_plain_checkpoints(tmp_path: Path) -> None:
    for name in ("gptq", "gptq_asymmetric", "gptq_row", "gptq_v2_act_order", "awq", "awq_some", "auto_round_awq"):
        alone = {spec.name: spec for spec in weight_specs(config_of(name), EngineConfig())}
        assert alone == specs_of(BY_NAME[name], tmp_path / name), name


def test_the_plan_counts_every_piece() -> None:
    config = config_of("gptq_v2_act_order")
    plan = plan_model(config, EngineConfig(), itemsize=2, max_context=64)
    sizes = {region.name: region.nbytes for region in plan.regions}
    assert sizes["layers.0.down.codes"] == 128 * 256 // 2 and sizes["layers.0.down.scales"] == 128 * 8 * 2
    assert sizes["layers.0.down.zeros"] == 128 * 8 and sizes["layers.0.down.perm"] == 256 * 4
    assert "layers.0.down" not in sizes and sizes["lm_head"] == 264 * 128 * 2
    own = ExecutorNeeds(packed=lambda spec: (PackedRegion("tiles", (spec.num_elements,), np.uint8),))
    plan = plan_model(config, EngineConfig(), itemsize=2, max_context=64, needs=own)
    assert plan.region("layers.1.qkv.tiles").nbytes == 256 * 128 and plan.part_bytes["layers"] > 0


@pytest.mark.parametrize("bits", [4, 8])
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from(DType), group=st.sampled_from([32, 64]))
def test_rounding_to_nearest(bits: int, seed: int, dtype: DType, group: int) -> None:
    values = np.random.default_rng(seed).standard_normal((3, 128), np.float32)
    values[1] = 0
    quant = Quantization(bits, group)
    codes, scales = round_to_nearest(values, quant, dtype)
    np.testing.assert_array_equal(round_to(scales, dtype), scales)
    weight = QuantizedWeight(codes, scales, None, None, (3, 128), group, bits)
    ((_, found),) = dequantized(weight)
    # A scale is rounded too, so the largest value of a group may be a little beyond the last code.
    allowed = np.repeat(scales, group, axis=1) * np.float32(0.5 + (127 if bits == 8 else 7) * 2.0**-8)
    assert (np.abs(found - values) <= allowed + 1e-6).all() and not found[1].any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_rounded_head(bits: int, tied: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tie_word_embeddings=tied, hidden_size=128)
    ids = list(range(3, 40))
    with LLM(folder, executor="reference") as llm:
        plain, specs = llm.logits(ids), {spec.name: spec for spec in llm.plan.tensors}
    with LLM(folder, executor="reference", lm_head_bits=bits) as llm:
        rounded, plan = llm.logits(ids), llm.plan
        assert llm.generate(ids, SamplingParams(max_new_tokens=3)).stats.new_tokens == 3
    assert plan.region("lm_head.codes").nbytes == 259 * 128 * bits // 8 and ("lm_head" in specs) is not tied
    assert plan.region("embed_tokens").nbytes == 259 * 128 * 4
    error = np.linalg.norm(rounded - plain) / np.linalg.norm(plain)
    assert {4: 0.05, 8: 0.002}[bits] < error < {4: 0.2, 8: 0.02}[bits]


def test_a_head_that_cannot_be_rounded(tmp_path: Path) -> None:
    folder = write_quantised(BY_NAME["gptq_row"], tmp_path / "model", 0)
    with pytest.raises(ConfigError, match="lm_head_bits.*quantised in the checkpoint"):
        LLM(folder, executor="reference", lm_head_bits=8)
    odd = ModelConfig.from_hf(BY_NAME["gptq"].config | {"hidden_size": 80, "num_attention_heads": 2})
    with pytest.raises(ConfigError, match="not a multiple of 32"):
        weight_specs(odd, EngineConfig(lm_head_bits=4))
    for wrong in (3, 16, True, "4", 4.0):
        with pytest.raises(ConfigError, match="lm_head_bits: expected 4 | 8"):
            EngineConfig(lm_head_bits=wrong)  # type: ignore[arg-type]


def test_dummy_weights_in_four_bits(tmp_path: Path) -> None:
    settings = BY_NAME["gptq_v2_act_order"].settings
    (tmp_path / "config.json").write_text(json.dumps(BY_NAME["gptq"].config | {"quantization_config": settings}))
    with LLM(tmp_path, executor="reference", load_format="dummy", seed=3) as llm:
        logits = llm.logits([1, 2, 3])
        assert np.isfinite(logits).all() and {"layers.0.qkv.perm", "lm_head"} <= {r.name for r in llm.plan.regions}
    with LLM(tmp_path, executor="reference", load_format="dummy", seed=3) as llm:
        np.testing.assert_array_equal(llm.logits([1, 2, 3]), logits)


def test_dummy_codes_keep_the_size_of_activations() -> None:
    spec = TensorSpec("layers.0.down", (256, 512), (), Quantization(4, 128, False, True))
    codes, scales = np.zeros((256, 256), np.uint8), np.zeros((256, 4), np.float32)
    zeros, perm = np.zeros((256, 4), np.uint8), np.zeros(512, np.int32)
    weight = QuantizedWeight(codes, scales, zeros, perm, (256, 512), 128)
    fill_dummy_quantised(spec, DType.BFLOAT16, 1, weight)
    values = np.concatenate([values for _, values in dequantized(weight)])
    assert values.std() * 512**0.5 == pytest.approx(1, rel=0.03) and sorted(perm) == list(range(512))


def test_loading_takes_little_more_than_the_weight(tmp_path: Path) -> None:
    n, k = 2048, 2048
    random = np.random.default_rng(0)
    write_safetensors(tmp_path / "model.safetensors", {
        "w.qweight": ("I32", random.integers(-(2**31), 2**31, (k // 8, n), np.int32)),
        "w.scales": ("F16", np.ones((k // 128, n), np.float16)),
        "w.qzeros": ("I32", random.integers(-(2**31), 2**31, (k // 128, n // 8), np.int32)),
    })  # fmt: skip
    config = config_of("gptq_asymmetric", {"group_size": 128})
    assert config.quantization is not None
    from cpmrt.weights.quantised_specs import quantised_specs

    plain = TensorSpec("layers.0.down", (n, k), (Source("w.weight", (n, k)),), product="residual")
    with Checkpoint.open(tmp_path) as checkpoint:
        (spec,) = quantised_specs([plain], config.quantization, checkpoint)
        codes, scales = np.zeros((n, k // 2), np.uint8), np.zeros((n, k // 128), np.float32)
        weight = QuantizedWeight(codes, scales, np.zeros((n, k // 128), np.uint8), None, (n, k), 128)
        tracemalloc.start()
        load_quantised(spec, checkpoint, DType.BFLOAT16, weight)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert codes.any() and peak < 8 << 20


def test_scales_beyond_float16(tmp_path: Path) -> None:
    tensors = raw_tensors(BY_NAME["compressed"], 0)
    tensors[f"{Q}.weight_scale"] = ("F32", np.full((128, 1), 1e6, np.float32))
    folder = write_quantised(BY_NAME["compressed"], tmp_path / "model", 0)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="scales.*beyond float16; use dtype bfloat16"):
        LLM(folder, executor="reference", dtype="float16")


def test_the_plan_of_the_config_fits_or_not() -> None:
    with pytest.raises(CpmrtError, match="does not fit"):
        fit_model(config_of("gptq"), EngineConfig(), itemsize=2, budget=10_000)
    plan = fit_model(config_of("gptq"), EngineConfig(), itemsize=2, budget=1 << 24)
    assert Arena(plan, np.zeros(plan.total_bytes, np.uint8)).array("layers.0.qkv.codes").shape == (256, 64)
