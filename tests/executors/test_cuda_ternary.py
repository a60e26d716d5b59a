"""Ternary checkpoints on the CUDA executor: near the reference and 16 bits, in any company, refused if malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.golden_models import relative
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM, SamplingParams
from cpmrt.bench.shapes import ternary_config
from cpmrt.errors import CheckpointError
from cpmrt.quantization.ternary import write_ternary
from cpmrt.weights.model_folder import ModelFolder

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 264,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128}
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
LONG = np.random.default_rng(0).integers(3, 259, 180).tolist()
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", params=[32, 64, 128, -1])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ternary checkpoint for each size of groups."""
    return written(tmp_path_factory.mktemp("ternary"), request.param)


def written(folder: Path, group_size: int) -> Path:
    plain = write_checkpoint(folder / "plain", **SIZES)
    write_ternary(ModelFolder.open(plain), folder / "ternary", group_size)
    return folder / "ternary"


def logits(folder: Path, ids: list[int], **settings: Any) -> Any:
    with LLM(folder, **SETTINGS | settings) as llm:
        return llm.logits(ids)


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [False, True], ids=["", "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_beside_the_reference_and_16_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, portable: bool
) -> None:
    if portable:
        monkeypatch.setenv("CPMRT_PORTABLE", "1")
    for ids in (LONG[:40], LONG):
        found = logits(folder, ids, executor="cuda", dtype=dtype)
        for other in ({"executor": "reference"}, {"executor": "cuda", "load_format": "safetensors"}):
            assert relative(found, logits(folder, ids, dtype=dtype, **other)) < TOLERANCE[dtype], (len(ids), other)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"dependent_launch": False}], ids=str)
def test_a_request_alone_gives_the_same_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = written(tmp_path, 128)
    prompts = [LONG[start : start + length] for start, length in ((0, 5), (9, 64), (20, 65), (30, 128), (40, 140))]
    with LLM(folder, executor="cuda", max_sequences=8, dtype="bfloat16", **SETTINGS) as llm:
        assert any(spec.quant for spec in llm.plan.tensors)
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        together = [stream.finish().token_ids for stream in streams]
    with LLM(folder, executor="cuda", dtype="bfloat16", **SETTINGS, **settings) as llm:
        assert [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts] == together


@pytest.mark.gpu
def test_waves_do_not_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, found = written(tmp_path, 64), []
    for most in (128 << 20, 0):
        monkeypatch.setattr("cpmrt.cuda.load.repack.LARGEST_STAGING_BYTES", most)
        monkeypatch.setattr("cpmrt.cuda.load.repack.ROUNDED_BYTES", most or 40_000)
        found.append(logits(folder, LONG[:70], executor="cuda", dtype="bfloat16").tobytes())
    assert found[0] == found[1]


@pytest.mark.gpu
def test_a_row_that_is_not_ternary_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    folder, name = written(tmp_path, 128), "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][5, 7] *= 1.5
    tensors[name][5, 8] = 1.75
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{name}' has values that are not -1, 0 or 1 .*load_format"):
        LLM(folder, executor="cuda", dtype="bfloat16", **SETTINGS)
    LLM(folder, executor="cuda", dtype="bfloat16", load_format="safetensors", **SETTINGS).close()


@pytest.mark.gpu
def test_random_weights(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", **SIZES)
    overrides = {"quantization_config": ternary_config(64)}
    settings = {"load_format": "dummy", "executor": "cuda", "dtype": "bfloat16", "hf_overrides": overrides}
    first, again, other = (logits(folder, LONG, seed=seed, **settings) for seed in (0, 0, 1))
    assert np.isfinite(first).all() and np.array_equal(first, again) and not np.array_equal(first, other)
