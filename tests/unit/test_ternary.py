"""Ternary weights: found in 16-bit files, held as 2-bit codes without loss, made by `cpmrt quantize`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf_models import write_pair
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tiny_checkpoint import write_checkpoint

from cpmrt import LLM
from cpmrt.bench.shapes import shape_config, ternary_config
from cpmrt.cli.main import main
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.dtypes import DType, round_to
from cpmrt.errors import CheckpointError, UnsupportedModelError
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import plan_model, weight_specs
from cpmrt.ops import QuantizedWeight
from cpmrt.quantization.ternary import ternary_values
from cpmrt.reference.assembly import ReferenceTarget
from cpmrt.reference.quantized import dequantized
from cpmrt.tensor_spec import Quantization, Source, TensorSpec
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.quantised import round_to_nearest
from cpmrt.weights.ternary import is_ternary, ternary_specs

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
IDS = list(range(3, 43))
LAST = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", **SIZES)


def ternary(model: Path, folder: Path, group_size: int = 128) -> Path:
    """Run `cpmrt quantize --method ternary` and return the folder it makes."""
    command = ["quantize", str(model), str(folder), "--method", "ternary", "--group-size", str(group_size), "--quiet"]
    assert main(command) == 0
    return folder


def found_specs(folder: Path, **settings: Any) -> dict[str, Quantization | None]:
    """Return the quantisation in which each matrix of a folder is held, by name."""
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    with Checkpoint.open(folder) as checkpoint:
        specs = weight_specs(config, EngineConfig(**settings), checkpoint)
    return {spec.name: spec.quant for spec in specs if spec.product is not None}


def logits(folder: Path, **settings: Any) -> Any:
    with LLM(folder, executor="reference", max_context=64, **settings) as llm:
        return llm.logits(IDS)


def plain_rule(values: Any, group: int, eps: float = 1e-5) -> Any:
    """Return the weights rounded by the published rule in float64, one group after another."""
    made = np.zeros_like(values, np.float64)
    for row, column in np.ndindex(values.shape[0], values.shape[1] // group):
        part = slice(column * group, (column + 1) * group)
        scale = max(np.abs(values[row, part].astype(np.float64)).mean(), eps)
        made[row, part] = scale * np.clip(np.round(values[row, part] / scale), -1, 1)
    return made


@pytest.mark.parametrize("group_size", [32, 64, 256, -1])
def test_values_follow_the_published_rule(group_size: int) -> None:
    values = np.random.default_rng(1).standard_normal((5, 512)).astype(np.float32)
    values[2] = 0
    made = ternary_values(values, group_size, DType.FLOAT32)
    np.testing.assert_allclose(made, plain_rule(values, 512 if group_size == -1 else group_size), rtol=1e-5)


@pytest.mark.parametrize(("group_size", "held"), [(32, 32), (64, 64), (128, 128), (256, 128), (-1, 128)])
def test_a_ternary_checkpoint_is_found_and_nothing_is_lost(
    model: Path, tmp_path: Path, group_size: int, held: int
) -> None:
    folder = ternary(model, tmp_path / "ternary", group_size)
    found = found_specs(folder)
    assert {name: quant for name, quant in found.items() if name != "lm_head"} == {
        name: Quantization(2, held) for name in found if name != "lm_head"
    }
    assert found.get("lm_head") is None
    np.testing.assert_allclose(logits(folder), logits(folder, load_format="safetensors"), atol=1e-4)


def test_sixteen_bit_weights_stay_so(model: Path, tmp_path: Path) -> None:
    assert set(found_specs(model).values()) == {None}
    assert set(found_specs(ternary(model, tmp_path / "ternary"), load_format="safetensors").values()) == {None}


def test_matrices_that_are_not_ternary_stay_in_16_bits_beside_others(model: Path, tmp_path: Path) -> None:
    folder = ternary(model, tmp_path / "ternary")
    tensors, plain = (load_file(path / "model.safetensors") for path in (folder, model))
    save_file(tensors | {LAST: plain[LAST]}, folder / "model.safetensors")
    found = found_specs(folder)
    assert found["layers.1.down"] is None and found["layers.0.down"] == Quantization(2, 128)
    np.testing.assert_allclose(logits(folder), logits(folder, load_format="safetensors"), atol=1e-4)


@pytest.mark.parametrize("value", [1.75, np.nan])
def test_a_row_that_is_not_ternary_is_an_error_that_names_the_tensor(
    model: Path, tmp_path: Path, value: float
) -> None:
    folder = ternary(model, tmp_path / "ternary")
    tensors = load_file(folder / "model.safetensors")
    tensors[LAST][5, 7] = value
    save_file(tensors, folder / "model.safetensors")
    assert found_specs(folder)["layers.1.down"] == Quantization(2, 128)
    with pytest.raises(CheckpointError, match=rf"'{LAST}'") as caught:
        LLM(folder, executor="reference", max_context=64)
    assert "\n" not in str(caught.value)
    if np.isfinite(value):
        assert "load_format" in str(caught.value)
        LLM(folder, executor="reference", max_context=64, load_format="safetensors").close()


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128]),
    st.sampled_from([DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32]),
)  # fmt: skip
def test_codes_stand_for_exactly_the_values(seed: int, group_size: int, dtype: DType) -> None:
    random = np.random.default_rng(seed)
    scales = round_to(np.exp2(random.uniform(-12, 4, (3, 256 // group_size, 1))).astype(np.float32), dtype)
    scales[0, 0] = 0
    values = (scales * random.integers(-1, 2, (3, 256 // group_size, group_size))).astype(np.float32).reshape(3, 256)
    assert is_ternary(values, group_size)
    codes, found = round_to_nearest(values, Quantization(2, group_size), dtype)
    assert codes.dtype == np.uint8 and codes.shape == (3, 64)
    weight = QuantizedWeight(codes, found, None, None, (3, 256), group_size, 2)
    ((_, rows),) = dequantized(weight)
    np.testing.assert_array_equal(rows, values)
    values[1, 70:72] = 3, 1
    assert not is_ternary(values, group_size)


def test_a_ternary_matrix_takes_two_bits_a_weight_and_its_scales() -> None:
    config = ModelConfig.from_hf(shape_config("minicpm4-8b") | {"quantization_config": ternary_config()})
    plan = plan_model(config, EngineConfig(), itemsize=4, max_context=64)
    layers = [spec for spec in plan.tensors if spec.quant is not None]
    weights = sum(spec.num_elements for spec in layers)
    held = sum(plan.region(f"{spec.name}.{part}").nbytes for spec in layers for part in ("codes", "scales"))
    assert len(layers) == 4 * 32 and weights > 7.5e9
    assert held == pytest.approx(weights * (2 / 8 + 4 / 128), rel=1e-6)


def test_an_8b_loads_into_less_than_3_gb(model: Path, tmp_path: Path) -> None:
    """A fake-quantised, untied 8B model in bf16 takes under 3 GB, with the head's 0.6 GB, which are pages of the
    file."""
    config = ModelConfig.from_hf(shape_config("minicpm4-8b") | {"quantization_config": ternary_config()})
    entries = {name: SimpleNamespace(dtype="BF16") for name in ("model.embed_tokens.weight", "lm_head.weight")}
    checkpoint = SimpleNamespace(entries=entries)
    specs = ReferenceTarget().held(weight_specs(config, EngineConfig()), checkpoint, DType.BFLOAT16)  # type: ignore[arg-type]
    plan = plan_model(config, EngineConfig(), itemsize=4, max_context=1024, specs=specs)
    (head,) = (spec for spec in plan.tensors if spec.name == "lm_head")
    assert plan.part_bytes["layers"] + head.num_bytes(4) < 2.8e9 and plan.total_bytes + head.num_bytes(4) < 3e9
    assert head.num_bytes(4) == 2 * 73448 * 4096


@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_stay_in_their_file(tmp_path: Path, is_tied: bool) -> None:
    plain = write_checkpoint(tmp_path / "plain", **SIZES, tie_word_embeddings=is_tied, torch_dtype="float16")
    tensors = load_file(plain / "model.safetensors")
    save_file({name: values.astype(np.float16) for name, values in tensors.items()}, plain / "model.safetensors")
    folder = ternary(plain, tmp_path / "ternary")
    expected = logits(folder, load_format="safetensors")
    with LLM(folder, executor="reference", max_context=64) as llm:
        names = {region.name for region in llm.plan.regions}
        (folder / "model.safetensors").unlink()
        found = llm.logits(IDS)
    assert not names & {"embed_tokens", "lm_head"} and "layers.0.qkv.codes" in names
    np.testing.assert_allclose(found, expected, atol=1e-4)
    folder = ternary(plain, tmp_path / "other")
    expected = logits(folder, load_format="safetensors", dtype="float32")
    np.testing.assert_allclose(logits(folder, dtype="float32"), expected, atol=1e-4)


def test_a_ternary_gguf_file_is_held_in_the_bytes_of_its_blocks(tmp_path: Path) -> None:
    """TQ2_0 matrices, with a Q4_K embedding and a Q6_K head as in BitCPM's files, stay in blocks: 2.4 GB for an 8B
    model."""
    types = {"token_embd.weight": "Q4_K", "output.weight": "Q6_K"}
    path = write_pair(tmp_path, "minicpm", lambda name: types.get(name, "TQ2_0")).gguf
    with LLM(path, executor="reference", dtype="bfloat16", max_context=64) as llm:
        assert np.isfinite(llm.logits(IDS)).all()
        held = {spec.name: spec for spec in llm.plan.tensors if len(spec.shape) > 1}
        regions = llm.plan.regions
    total = 0.0
    for spec in tensor_specs(ModelConfig.from_hf(shape_config("minicpm4-8b"))):
        if len(spec.shape) > 1:
            small = held[re.sub(r"layers\.\d+", "layers.0", spec.name)]
            nbytes = sum(region.nbytes for region in regions if region.name.startswith(f"{small.name}.blocks"))
            assert nbytes > 0, small.name
            total += nbytes / small.num_elements * spec.num_elements
    assert 2.3e9 < total < 2.6e9


def test_a_config_may_promise_ternary_weights(model: Path, tmp_path: Path) -> None:
    folder = ternary(model, tmp_path / "ternary", 64)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": ternary_config(64)}))
    assert found_specs(folder)["layers.1.down"] == Quantization(2, 64)
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="not -1, 0 or 1 times the scale"):
        LLM(folder, executor="reference", max_context=64)
    odd = ModelConfig.from_hf(raw | {"intermediate_size": 352, "quantization_config": ternary_config(64)})
    with pytest.raises(UnsupportedModelError, match=r"columns of a ternary weight: expected a multiple of 64, got 352"):
        weight_specs(odd, EngineConfig())


def test_groups_that_do_not_divide_the_columns_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = write_checkpoint(tmp_path / "small")
    assert main(["quantize", str(small), str(tmp_path / "out"), "--method", "ternary", "--quiet"]) == 1
    assert "expected a multiple of the group size 128" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["quantize", str(model), str(tmp_path / "out"), "--method", "rtn", "--group-size", "256"]) == 1


def test_a_mixture_of_experts_is_not_made_ternary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture = write_checkpoint(tmp_path / "mixture", num_experts=4, num_experts_per_tok=2)
    for method in ("ternary", "rtn"):
        command = ["quantize", str(mixture), str(tmp_path / "out"), "--method", method, "--group-size", "32"]
        assert main(command) == 1
        assert "mixture-of-experts layers cannot be quantised here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("num_columns", "scale", "group_size"), [
    (256, 0.5, 128), (192, 0.5, 64), (96, 0.5, 32), (48, 0.5, None), (256, 0.0, None),
])  # fmt: skip
def test_groups_are_whole_in_every_row_and_zeros_alone_are_no_sign(
    num_columns: int, scale: float, group_size: int | None, tmp_path: Path
) -> None:
    values = np.random.default_rng(1).choice(np.float16([-1, 0, 1]), (8, num_columns)) * np.float16(scale)
    save_file({"w": values}, tmp_path / "model.safetensors")
    spec = TensorSpec("layers.0.down", values.shape, (Source("w", values.shape),), product="residual")
    with Checkpoint.open(tmp_path) as checkpoint:
        (found,) = ternary_specs([spec], checkpoint)
    assert found.quant == (group_size and Quantization(2, group_size))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_weights_that_are_none_are_not_made_ternary(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    folder = write_checkpoint(tmp_path / "broken", **SIZES)
    weights = load_file(model / "model.safetensors")
    weights[LAST][3, 5] = value
    save_file(weights, folder / "model.safetensors")
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--method", "ternary", "--quiet"]) == 1
    assert f"{LAST}: expected finite weights below 100000" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_matrix_of_another_shape_than_promised_is_left_as_it_is(tmp_path: Path) -> None:
    """`weights.check` refuses it with a message that names it."""
    save_file({"a": np.ones((8, 33), np.float16)}, tmp_path / "model.safetensors")
    spec = TensorSpec("a", (8, 64), (Source("a", (8, 64)),), product="residual")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert ternary_specs([spec], checkpoint) == (spec,)


def test_a_plan_knows_the_ternary_weights_that_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "ternary")
    assert main(["quantize", "demo", folder, "--method", "ternary"]) == 0
    assert re.fullmatch(rf"{re.escape(folder)}: [\d.]+ MiB\n", capsys.readouterr().err)

    def layers(*arguments: str) -> int:
        assert main(["plan", *arguments, "--json"]) == 0
        return int(json.loads(capsys.readouterr().out)["part_bytes"]["layers"])

    assert layers(folder) == layers("--weight-bits", "2") < layers() / 4
