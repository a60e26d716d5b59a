"""Quantised checkpoints of every format on the CUDA executor: transformers, the reference, and the same bits again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors.cuda_models import Agreement
from reference.golden_models import relative, typical
from reference.quantised_models import (
    CASES,
    QuantisedCase,
    golden,
    raw_tensors,
    write_golden_cases,
    write_safetensors,
)
from wide_head import write_wide_head

from cpmrt import LLM, SamplingParams
from cpmrt.dtypes import DType, round_to
from cpmrt.engine.step_log import replay
from cpmrt.errors import CheckpointError
from cpmrt.ops import QuantizedWeight
from cpmrt.reference import ops as reference_ops

# The GPU sums in another order than the reference, and rounds normalised rows before their 1 / rms. Errors are relative
# to the norm of 180 x 264 logits: 0.022 and 0.0035 at worst, in the ratio of the types' roundings (8 and 11 bits).
REFERENCE_TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
GOLDEN_TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3}
LOGPROB_TOLERANCE = {"bfloat16": 0.2, "float16": 0.02}
SETTINGS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128}
BY_NAME = {case.name: case for case in CASES}
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
LONG = np.random.default_rng(0).integers(3, 264, 180).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_golden_cases(tmp_path_factory.mktemp("quantised"))


@contextmanager
def weights_of_chunks_rounded(monkeypatch: pytest.MonkeyPatch, dtype: DType) -> Iterator[None]:
    """Make the reference round dequantised weights to 16 bits in a prefill, as a GPU does."""
    linear = reference_ops.linear

    def rounding(x: Any, weight: Any, *, is_prefill: bool = False) -> Any:
        if not isinstance(weight, QuantizedWeight) or not is_prefill:
            return linear(x, weight, is_prefill=is_prefill)
        dense = np.concatenate([values for _, values in reference_ops.dequantized(weight)])
        return linear(x if weight.perm is None else x[:, weight.perm], round_to(dense, dtype), is_prefill=True)

    with monkeypatch.context() as patch:
        patch.setattr(reference_ops, "linear", rounding)
        yield


def check(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, dtype: str, **settings: Any) -> None:
    data, steps = golden(name), list[Any]()
    prompt, greedy = data["prompt_ids"].tolist(), data["greedy_ids"].tolist()
    params = SamplingParams(max_new_tokens=len(greedy), logprobs=5, ignore_eos=True)
    settings = SETTINGS | settings | {"dtype": dtype}
    with LLM(folder, executor="cuda", on_step=lambda *record: steps.append(record), **settings) as llm:
        short, long = llm.logits(prompt + greedy), llm.logits(LONG)
        llm.generate(prompt, params)
        llm.generate(LONG[:100], params)
    stored, error = DType.parse(dtype), typical if "experts" in name else relative
    with weights_of_chunks_rounded(monkeypatch, stored), LLM(folder, executor="reference", **settings) as reference:
        assert error(short, reference.logits(prompt + greedy)) < REFERENCE_TOLERANCE[dtype]
        assert error(long, reference.logits(LONG)) < REFERENCE_TOLERANCE[dtype]
        agreement = Agreement(steps, replay([step for step, _ in steps], reference.executor))
    assert agreement.compared >= 6 and agreement.worst < LOGPROB_TOLERANCE[dtype]
    # These are few positions, for which bfloat16 may choose other experts; the median over more was checked above.
    if "lm_head_bits" not in settings and (dtype == "float16" or "experts" not in name):
        assert error(short[-len(data["logits"]) :], data["logits"]) < GOLDEN_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_format(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    check(monkeypatch, folders[name], name, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gptq_v2_act_order", "marlin"])
def test_the_path_of_older_gpus(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CPMRT_PORTABLE", "1")
    check(monkeypatch, folders[name], name, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gptq", "awq_some"])
def test_a_head_that_is_rounded_while_loading(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, bits: int
) -> None:
    check(monkeypatch, folders[name], name, dtype, lm_head_bits=bits)


@pytest.mark.gpu
def test_another_model_is_noticed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's golden file is outside the tolerance."""
    with pytest.raises(AssertionError):
        check(monkeypatch, folders["gptq"], "gptq_row", "float16")


@pytest.fixture(scope="module", params=["gptq_asymmetric", "gptq_v2_act_order", "compressed_channel"])
def together(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[Path, list[Any]]]:
    """A checkpoint, and the tokens that five requests give when they run together."""
    with LLM(folders[request.param], executor="cuda", max_sequences=8, **SETTINGS) as llm:
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts()]
        yield folders[request.param], [stream.finish().token_ids for stream in streams]


def prompts() -> list[list[int]]:
    return [LONG[start : start + length] for start, length in ((0, 5), (9, 64), (20, 65), (30, 128), (40, 140))]


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False}, {"dependent_launch": False}], ids=str)
def test_a_request_alone_gives_the_same_tokens(together: tuple[Path, list[Any]], settings: dict[str, Any]) -> None:
    folder, expected = together
    with LLM(folder, executor="cuda", **SETTINGS, **settings) as llm:
        assert [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts()] == expected


@pytest.mark.gpu
def test_a_request_that_grows_long_gives_the_same_tokens(
    together: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = together
    monkeypatch.setattr("cpmrt.cuda.step.lengths.SHORT_KEYS", 70)
    with LLM(folder, executor="cuda", **SETTINGS) as llm:
        assert [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts()] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gptq", "awq", "compressed_asymmetric", "marlin_row"])
def test_waves_do_not_change_a_bit(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Loading all tensors at once or one source after the other gives the same bits."""
    found = []
    for most in (128 << 20, 0):
        monkeypatch.setattr("cpmrt.cuda.load.repack.LARGEST_STAGING_BYTES", most)
        monkeypatch.setattr("cpmrt.cuda.load.repack.ROUNDED_BYTES", most or 40_000)
        with LLM(folders[name], executor="cuda", lm_head_bits=4, **SETTINGS) as llm:
            found.append(llm.logits(LONG[:70]).tobytes())
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [256])
def test_slices_of_a_chunk_do_not_change_the_result(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    whole = logits_of(folders["gptq_v2_act_order"])
    monkeypatch.setattr("cpmrt.cuda.ops.linear_packed.products.UNPACKED_BYTES", 2 * rows * 128)
    assert relative(logits_of(folders["gptq_v2_act_order"]), whole) < REFERENCE_TOLERANCE["float16"]


def logits_of(folder: Path) -> Any:
    with LLM(folder, executor="cuda", **SETTINGS) as llm:
        return llm.logits(LONG)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "tensor", "words", "message"),
    [
        ("gptq", "self_attn.o_proj.scales", np.float16([np.nan]), "scales that are not finite"),
        ("gptq", "mlp.down_proj.qzeros", np.int32([0x77777776]), "contradicts the symmetric quantisation"),
        ("gptq_v2_act_order", "mlp.down_proj.scales", np.uint16([0x4900]), "are beyond float16; use dtype bfloat16"),
    ],
)
def test_values_that_cannot_be_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, tensor: str, words: Any, message: str
) -> None:
    case: QuantisedCase = BY_NAME[name]
    folder = Path(shutil.copytree(folders[name], tmp_path / name))
    tensors = raw_tensors(case, int(golden(name)["seed"]))
    kind, stored = tensors[f"model.layers.1.{tensor}"]
    changed = stored.copy()
    changed.reshape(-1)[-1:] = words
    write_safetensors(folder / case.file, tensors | {f"model.layers.1.{tensor}": (kind, changed)})
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, executor="cuda", dtype="float16", **SETTINGS)
    with LLM(folders[name], executor="cuda", dtype="float16", **SETTINGS) as llm:
        assert np.isfinite(llm.logits(LONG[:5])).all()


@pytest.mark.gpu
def test_a_head_in_eight_bits_is_nearer_to_one_in_sixteen(folders: dict[str, Path]) -> None:
    logits = {}
    for bits in (None, 8, 4):
        with LLM(folders["gptq"], executor="cuda", lm_head_bits=bits, **SETTINGS) as llm:
            logits[bits] = llm.logits(LONG)
    assert 0 < relative(logits[8], logits[None]) < relative(logits[4], logits[None]) / 4


@pytest.mark.gpu
@pytest.mark.parametrize(("order", "head_bits"), [(False, None), (True, 4), (False, 8)])
def test_random_weights(folders: dict[str, Path], order: bool, head_bits: int | None) -> None:
    """Random quantised weights keep the size of activations: logits spread as those of weights in 16 bits."""
    quantised = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": order}
    overrides = {"quantization_config": quantised, "torch_dtype": "bfloat16"}
    spreads = []
    for seed, hf_overrides in ((0, overrides), (0, overrides), (1, overrides), (0, {"quantization_config": None})):
        bits = head_bits if hf_overrides is overrides else None
        settings = SETTINGS | {"load_format": "dummy", "seed": seed, "hf_overrides": hf_overrides, "lm_head_bits": bits}
        with LLM(folders["gptq"], executor="cuda", **settings) as llm:
            logits = llm.logits(LONG)
            assert np.isfinite(logits).all()
            spreads.append(float(logits.std()))
    assert spreads[0] == spreads[1] != spreads[2]
    assert 0.7 < spreads[0] / spreads[3] < 1.4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_in_8_bits_is_read_as_it_is(tmp_path: Path, dtype: str) -> None:
    """A head in 8 bits is near the reference, which reads the same bytes, for short prompts and a long one."""
    folder, settings = write_wide_head(tmp_path), SETTINGS | {"dtype": dtype}
    with LLM(folder, executor="cuda", **settings) as llm:
        short, long = llm.logits(LONG[:40]), llm.logits(LONG)
        assert llm.generate(LONG[:100], SAMPLED).stats.new_tokens == SAMPLED.max_new_tokens
    with LLM(folder, executor="reference", **settings) as reference:
        assert relative(short, reference.logits(LONG[:40])) < REFERENCE_TOLERANCE[dtype]
        assert relative(long, reference.logits(LONG)) < REFERENCE_TOLERANCE[dtype]
