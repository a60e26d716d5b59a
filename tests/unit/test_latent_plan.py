"""Figures of MiniCPM3-4B: memory per token, work per step and prompt, and the shapes that a GPU accepts."""

from __future__ import annotations

from typing import Any

import pytest

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.bench.work import decode_bytes, prefill_flops
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.precompile import known_device
from cpmrt.cuda.step.memory import check_supported, cuda_needs
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.planning import plan_model, weight_specs

LAYERS, HIDDEN, INNER, VOCAB = 62, 2560, 6400, 73448
ATTENTION = HIDDEN * (768 + 288) + 3840 * 768 + 5120 * 256 + HIDDEN * HIDDEN
NORMS = 2 * HIDDEN + 768 + 256


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(shape_config("minicpm3-4b") | changes)


def test_a_token_takes_288_values_a_layer() -> None:
    engine = EngineConfig(max_sequences=2)
    plan = plan_model(config(), engine, itemsize=2, max_context=32768)
    assert plan.caches.bytes_per_token(2) == LAYERS * 288 * 2 == 35_712
    assert plan.region("latent_pages").shape == (LAYERS, 2 * 512, 1, 64, 288)


def test_a_step_reads_every_weight_once_and_the_latents() -> None:
    weights = LAYERS * (ATTENTION + 3 * HIDDEN * INNER + NORMS) + (VOCAB + 1) * HIDDEN
    assert decode_bytes(config(), 1024, 1, itemsize=2) == 2 * weights + 1024 * 35_712


def test_a_prompt_attends_with_96_elements_and_weighs_64() -> None:
    pairs = 1100 * 1101 // 2
    dense = 2 * 1100 * LAYERS * (ATTENTION + 3 * HIDDEN * INNER) + 2 * HIDDEN * VOCAB
    assert prefill_flops(config(), 1100) == dense + LAYERS * 40 * 2 * (96 + 64) * pairs


def test_in_four_bits_what_makes_keys_and_values_stays_in_sixteen() -> None:
    specs = {spec.name: spec for spec in weight_specs(config(quantization_config=gptq_config()), EngineConfig())}
    quantised = {name.split(".")[-1] for name, spec in specs.items() if spec.quant}
    assert quantised == {"latent_down", "q_up", "output", "gate_up", "down"}
    assert specs["layers.0.kv_up"].sources[0].packing is not None, "it is dequantised while it is loaded"


def test_partial_results_have_room_for_the_rows_of_the_settings() -> None:
    def rows(**settings: Any) -> int:
        needs = cuda_needs(config(), EngineConfig(**settings), weight_specs(config(), EngineConfig()), device)
        buffers = {spec.name: spec for spec in needs.context_workspace(32768)}
        assert buffers["expanded_k"].shape == (512, 40, 64, 96)
        assert buffers["latent_means"].shape[1:] == (132, 40, 256)
        assert buffers["latent_log_sums"].shape[1:] == (40, 132)
        return buffers["latent_means"].shape[0]

    device = known_device("sm_90")
    assert (rows(), rows(max_sequences=3), rows(max_sequences=64)) == (8, 8, 64)


@pytest.mark.parametrize(("changes", "message"), [
    ({"kv_lora_rank": 320}, "kv_lora_rank: expected 256, 512 or 1024, got 320"),
    ({"q_lora_rank": 100}, "q_lora_rank: expected a multiple of 64, got 100"),
    ({"qk_nope_head_dim": 48}, "qk_nope_head_dim \\+ qk_rope_head_dim: expected 64, 96 or 128, got 80"),
    ({"v_head_dim": 112}, "v_head_dim: expected a multiple of 32, at most 96, got 112"),
    ({"hidden_size": 2720}, "hidden_size: expected a multiple of 64"),
    ({"intermediate_size": 6432}, "intermediate_size: expected a multiple of 64"),
])  # fmt: skip
def test_a_shape_without_kernels_is_refused_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    check_supported(config())
    with pytest.raises(UnsupportedModelError, match=f"{message}.*use executor='reference'"):
        check_supported(config(**changes))
