"""Comparing a checkpoint with what a model needs, packing tensors, and dummy weights."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from timing import least_cpu_seconds, slowness

from cpmrt.dtypes import Array, DType, from_float32, to_float32
from cpmrt.errors import CheckpointError, UnsupportedModelError
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.dummy import dummy
from cpmrt.weights.pack import pack

ROWS = TensorSpec("qkv_proj", (5, 3), (Source("q", (2, 3)), Source("k", (2, 3)), Source("v", (1, 3))))
NORM = TensorSpec("norm", (3,), (Source("model.norm.weight", (3,)),))


def checkpoint_of(folder: Path, tensors: dict[str, Array]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def float_tensors(dtype: type = np.float32) -> dict[str, Array]:
    random = np.random.default_rng(0)
    shapes = {source.name: source.shape for spec in (ROWS, NORM) for source in spec.sources}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_bf16(path: Path, words: Array) -> None:
    header = f'{{"w":{{"dtype":"BF16","shape":{list(words.shape)},"data_offsets":[0,{words.nbytes}]}}}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + words.tobytes())


def refusal(folder: Path, tensors: dict[str, Array], **options: object) -> str:
    with checkpoint_of(folder, tensors) as checkpoint, pytest.raises(CheckpointError) as caught:
        check([ROWS, NORM], checkpoint, **options)  # type: ignore[arg-type]
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_complete_checkpoint_passes(dtype: type, tmp_path: Path) -> None:
    with checkpoint_of(tmp_path, float_tensors(dtype)) as checkpoint:
        check([ROWS, NORM], checkpoint)


def test_all_faults_are_in_one_message(tmp_path: Path) -> None:
    tensors = float_tensors()
    del tensors["q"]
    tensors["k"] = tensors["k"].T.copy()
    tensors["v"] = np.zeros((1, 3), np.int32)
    tensors["extra"] = np.zeros(1, np.float32)
    message = refusal(tmp_path, tensors)
    assert "expected 4 tensors" in message
    assert "1 missing: 'q'; 1 unexpected: 'extra'" in message
    assert "2 wrong: 'k' (expected [2, 3], got [3, 2]), 'v' (expected F32 | F16 | BF16, got I32)" in message


def test_long_lists_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, float_tensors() | {f"extra.{i}": np.zeros(1, np.float32) for i in range(20)})
    assert "20 unexpected: " in message and message.count("'extra.") == 8 and "and 12 more" in message


def test_leftovers_are_ignored(tmp_path: Path) -> None:
    leftovers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": np.zeros((4, 3), np.float32),
    }
    with checkpoint_of(tmp_path, float_tensors() | leftovers) as checkpoint:
        check([ROWS, NORM], checkpoint)
    assert "2 unexpected" in refusal(tmp_path, float_tensors() | leftovers, ignore=())
    assert "1 unexpected: 'lm_head.weight'" in refusal(tmp_path, float_tensors() | leftovers, ignore=("*.inv_freq",))


@pytest.mark.parametrize("rows", [3, 5])
def test_a_head_that_the_config_ties_is_a_copy_of_the_embedding(tmp_path: Path, rows: int) -> None:
    spec = TensorSpec("embed_tokens", (4, 3), (Source("model.embed_tokens.weight", (4, 3)),))
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    embedding[0, 0] = np.nan  # equal bits are a copy, even of NaN
    tail = np.concatenate([embedding[:-1], -embedding[-1:]])
    others = {"another": -embedding, "another_at_its_end": tail, "another_shape": np.resize(embedding, (rows, 3))}
    for label, head in {"copy": embedding, "another_type": -embedding.astype(np.float16), **others}.items():
        (tmp_path / label).mkdir()
        tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        with checkpoint_of(tmp_path / label, tensors) as checkpoint:
            if label not in others:
                check([spec], checkpoint)
                continue
            with pytest.raises(CheckpointError, match="ties the output head.*another matrix.*tie_word_embeddings"):
                check([spec], checkpoint)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    head = TensorSpec("lm_head", (4, 3), (Source("lm_head.weight", (4, 3)),))
    missing = pytest.raises(CheckpointError, match=r"1 missing: 'lm_head\.weight'")
    with checkpoint_of(tmp_path, float_tensors()) as checkpoint, missing:
        check([ROWS, NORM, head], checkpoint)


@pytest.mark.parametrize(
    "suffixes, expected",
    [
        (["qweight", "qzeros", "scales", "g_idx"], "(GPTQ)"),
        (["qweight", "qzeros", "scales"], "(GPTQ or AWQ)"),
        (["qweight", "scales"], "(GPTQ, AWQ or Marlin)"),
        (["weight_packed", "weight_scale", "weight_shape"], "(compressed-tensors)"),
        (["weight.absmax", "weight.quant_state.bitsandbytes__nf4"], "(bitsandbytes)"),
        (["weight_scale_inv"], "(block FP8)"),
    ],
)
def test_quantised_weights_are_named(suffixes: list[str], expected: str, tmp_path: Path) -> None:
    tensors: dict[str, Array] = {f"layers.0.q_proj.{suffix}": np.zeros(1, np.int32) for suffix in suffixes}
    with checkpoint_of(tmp_path, tensors) as checkpoint, pytest.raises(UnsupportedModelError) as caught:
        check([ROWS, NORM], checkpoint)
    assert expected in str(caught.value) and f"'layers.0.q_proj.{min(suffixes)}'" in str(caught.value)


def test_wanted_tensors_are_no_mark_of_quantisation(tmp_path: Path) -> None:
    spec = TensorSpec("scales", (3,), (Source("q_proj.scales", (3,)),))
    with checkpoint_of(tmp_path, {"q_proj.scales": np.zeros(3, np.float16)}) as checkpoint:
        check([spec], checkpoint)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_sources_are_packed_row_after_row(stored: type, dtype: DType, tmp_path: Path) -> None:
    tensors = float_tensors(stored)
    with checkpoint_of(tmp_path, tensors) as checkpoint:
        packed = pack(ROWS, checkpoint, dtype)
    rows = np.concatenate([tensors["q"], tensors["k"], tensors["v"]]).astype(np.float32)
    assert packed.dtype == dtype.storage and packed.shape == ROWS.shape
    np.testing.assert_array_equal(packed, from_float32(rows, dtype))


def test_bfloat16_is_packed_without_loss(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0x3000, 0x4000, (4, 2), np.uint16)
    write_bf16(tmp_path / "model.safetensors", words)
    spec = TensorSpec("w", (4, 2), (Source("w", (4, 2)),))
    with Checkpoint.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(pack(spec, checkpoint, DType.BFLOAT16), words)
        np.testing.assert_array_equal(pack(spec, checkpoint, DType.FLOAT32), to_float32(words, DType.BFLOAT16))


def test_a_single_source_of_the_same_type_is_not_copied(tmp_path: Path) -> None:
    with checkpoint_of(tmp_path, float_tensors()) as checkpoint:
        packed = pack(NORM, checkpoint, DType.FLOAT32)
        assert np.shares_memory(packed, checkpoint.view("model.norm.weight")) and not packed.flags.writeable
        converted = pack(NORM, checkpoint, DType.FLOAT16)
        assert converted.flags.owndata or converted.base.flags.owndata


def test_an_unaligned_source_is_copied_to_alignment(tmp_path: Path) -> None:
    words = np.arange(8, dtype=np.uint16).reshape(4, 2)
    write_bf16(tmp_path / "model.safetensors", words)
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    odd = 1 - length % 2  # make the header's length odd
    padded = (length + odd).to_bytes(8, "little") + content[8 : 8 + length] + b" " * odd + content[8 + length :]
    (tmp_path / "model.safetensors").write_bytes(padded)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert not checkpoint.view("w").flags.aligned
        packed = pack(TensorSpec("w", (4, 2), (Source("w", (4, 2)),)), checkpoint, DType.BFLOAT16)
    assert packed.flags.aligned
    np.testing.assert_array_equal(packed, words)


def test_large_tensors_are_converted_whole(tmp_path: Path) -> None:
    """A tensor larger than one conversion chunk, and no multiple of it, is converted whole."""
    values = np.random.default_rng(0).standard_normal((701, 1009), np.float32)
    spec = TensorSpec("w", values.shape, (Source("w", values.shape),))
    with checkpoint_of(tmp_path, {"w": values}) as checkpoint:
        np.testing.assert_array_equal(pack(spec, checkpoint, DType.BFLOAT16), from_float32(values, DType.BFLOAT16))


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    tensors = float_tensors()
    tensors["model.norm.weight"][1] = 70000.0
    with checkpoint_of(tmp_path, tensors) as checkpoint:
        with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has values beyond float16; use dtype"):
            pack(NORM, checkpoint, DType.FLOAT16)
        assert pack(NORM, checkpoint, DType.FLOAT32)[1] == 70000.0


@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_values_beyond_bfloat16_are_refused(value: float, tmp_path: Path) -> None:
    """The largest values of float32 would become infinity in bfloat16; those that are rounded down are taken."""
    tensors = {"model.norm.weight": np.float32([3.39e38, value, 1.0])}
    with checkpoint_of(tmp_path, tensors) as checkpoint:
        with pytest.raises(CheckpointError, match="has values beyond bfloat16; use dtype float32"):
            pack(NORM, checkpoint, DType.BFLOAT16)
        assert pack(NORM, checkpoint, DType.FLOAT32)[1] == np.float32(value)
    with checkpoint_of(tmp_path, {"model.norm.weight": np.float32([3.39e38, -3.39e38, 1.0])}) as checkpoint:
        np.testing.assert_array_equal(pack(NORM, checkpoint, DType.BFLOAT16), np.uint16([0x7F7F, 0xFF7F, 0x3F80]))


@pytest.mark.parametrize(
    "tensor, expected",
    [
        (None, "no tensor 'model.norm.weight'"),
        (np.zeros(4, np.float32), "expected F32 | F16 | BF16 [3], got F32 [4]"),
        (np.zeros(3, np.int32), "got I32"),
    ],
)
def test_pack_itself_refuses_a_wrong_source(tensor: Array | None, expected: str, tmp_path: Path) -> None:
    tensors = {"other": np.zeros(1, np.float32)} if tensor is None else {"model.norm.weight": tensor}
    with checkpoint_of(tmp_path, tensors) as checkpoint, pytest.raises(CheckpointError) as caught:
        pack(NORM, checkpoint, DType.FLOAT32)
    assert expected in str(caught.value)


MATRIX = TensorSpec("layers.0.gate_up_proj", (512, 1024), ())


@pytest.mark.parametrize("dtype", DType)
def test_dummy_matrices_keep_the_size_of_activations(dtype: DType) -> None:
    words = dummy(MATRIX, dtype, seed=1)
    assert words.shape == MATRIX.shape and words.dtype == dtype.storage
    values = to_float32(words, dtype)
    assert np.isfinite(values).all() and abs(values.mean()) < 1e-3
    assert values.std() * 1024**0.5 == pytest.approx(1, rel=0.02)
    outputs = values @ np.random.default_rng(0).standard_normal(1024, np.float32)
    assert outputs.std() == pytest.approx(1, rel=0.2)
    assert abs(np.corrcoef(values[0], values[1])[0, 1]) < 0.2


def test_dummy_norms_are_ones_and_biases_small() -> None:
    norm = dummy(TensorSpec("layers.0.input_layernorm", (8,), ()), DType.BFLOAT16, seed=1)
    np.testing.assert_array_equal(to_float32(norm, DType.BFLOAT16), np.ones(8))
    bias = dummy(TensorSpec("layers.0.qkv_proj_bias", (4096,), ()), DType.FLOAT32, seed=1)
    assert bias.std() == pytest.approx(0.02, rel=0.1)


@given(st.integers(0, 2**64 - 1), st.text(max_size=10))
def test_dummy_depends_on_seed_and_name_only(seed: int, name: str) -> None:
    spec = TensorSpec(name + "_proj", (4, 8), ())
    first = dummy(spec, DType.FLOAT16, seed)
    np.testing.assert_array_equal(first, dummy(spec, DType.FLOAT16, seed))
    assert (first != dummy(spec, DType.FLOAT16, seed + 1)).any()
    assert (first != dummy(TensorSpec(name + "_other", (4, 8), ()), DType.FLOAT16, seed)).any()


def test_dummy_is_fast() -> None:
    spec = TensorSpec("embed_tokens", (25_000, 1000), ())
    # Half a billion elements in under ten seconds, more on a slow core.
    limit = 0.5 * slowness(time.process_time)
    assert least_cpu_seconds(lambda: dummy(spec, DType.BFLOAT16, seed=0), limit) < limit
