"""Quantised checkpoints of every format against formulas written out in torch, and transformers on what they give."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from reference.quantised_models import CASES, QUANTISED_GOLDEN, QuantisedCase, golden, write_golden_cases

from cpmrt import LLM
from cpmrt.config import EngineConfig, SamplingParams
from cpmrt.dtypes import Array, DType, from_float32
from cpmrt.memory.arena import Arena
from cpmrt.memory.plan import make_plan
from cpmrt.models.decoder import cache_layout
from cpmrt.models.planning import weight_specs
from cpmrt.reference.quantized import dequantized, quantized_arrays
from cpmrt.tensor_spec import Source, TensorSpec
from cpmrt.weights.check import check
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.quantised import dequantised_blocks, load_quantised

LOGIT_TOLERANCE = 1e-4
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_golden_cases(tmp_path_factory.mktemp("quantised"))


def digest(values: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def packed_sources(specs: tuple[TensorSpec, ...]) -> Iterator[Source]:
    for spec in specs:
        yield from (source for source in spec.sources if source.packing is not None)


@by_case
def test_weights_are_those_of_the_formulas_bit_for_bit(case: QuantisedCase, folders: dict[str, Path]) -> None:
    expected = json.loads(str(golden(case.name)["digests"]))
    stored = DType.BFLOAT16 if case.scales == "BF16" else DType.FLOAT16
    with Checkpoint.open(folders[case.name]) as checkpoint:
        specs = weight_specs(ModelFolder.open(folders[case.name]).config, EngineConfig(), checkpoint)
        check(specs, checkpoint)
        found = {}
        for source in packed_sources(specs):
            weight = np.concatenate(list(dequantised_blocks(source, checkpoint)))
            found[source.name] = {"float32": digest(weight), "stored": digest(from_float32(weight, stored))}
    assert found == expected


@by_case
def test_the_executor_holds_the_same_weights(case: QuantisedCase, folders: dict[str, Path]) -> None:
    config = ModelFolder.open(folders[case.name]).config
    with Checkpoint.open(folders[case.name]) as checkpoint:
        specs = [spec for spec in weight_specs(config, EngineConfig(), checkpoint) if spec.quant]
        plan = make_plan(specs, (), (), cache_layout(config, 64, 1), itemsize=4)
        held_arrays = Arena(plan, np.zeros(plan.total_bytes, np.uint8)).arrays()
        for spec in specs:
            held = quantized_arrays(spec, held_arrays)
            load_quantised(spec, checkpoint, DType.FLOAT32, held)
            stored = np.concatenate([values for _, values in dequantized(held)])
            weight = np.empty_like(stored)
            weight[:, slice(None) if held.perm is None else held.perm] = stored
            blocks = [block for source in spec.sources for block in dequantised_blocks(source, checkpoint)]
            np.testing.assert_array_equal(weight, np.concatenate(blocks))
    assert len(specs) >= 4


@by_case
def test_generates_as_transformers_does(case: QuantisedCase, folders: dict[str, Path]) -> None:
    data = golden(case.name)
    prompt, expected = data["prompt_ids"].tolist(), data["greedy_ids"].tolist()
    with LLM(folders[case.name], executor="reference", dtype="float32", max_context=64) as llm:
        logits = llm.logits(prompt + expected)[-len(data["logits"]) :]
        assert np.linalg.norm(logits - data["logits"]) < LOGIT_TOLERANCE * np.linalg.norm(data["logits"])
        params = SamplingParams(max_new_tokens=len(expected), ignore_eos=True)
        assert list(llm.generate(prompt, params).token_ids) == expected


@pytest.mark.parametrize("name", ["gptq_v2_act_order", "awq", "compressed_asymmetric", "marlin"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_in_sixteen_bits(name: str, dtype: str, folders: dict[str, Path]) -> None:
    data = golden(name)
    with LLM(folders[name], executor="reference", dtype=dtype, max_context=64) as llm:
        logits = llm.logits([*data["prompt_ids"].tolist(), *data["greedy_ids"].tolist()])[-len(data["logits"]) :]
    error = np.linalg.norm(logits - data["logits"]) / np.linalg.norm(data["logits"])
    assert 1e-5 < error < {"float16": 5e-3, "bfloat16": 4e-2}[dtype]


def test_there_is_a_file_for_every_case() -> None:
    assert {path.stem for path in QUANTISED_GOLDEN.iterdir()} == {case.name for case in CASES}
    assert sum(path.stat().st_size for path in QUANTISED_GOLDEN.iterdir()) < 200_000
    for case in CASES:
        assert json.loads(str(golden(case.name)["config"])) == case.config
        assert json.loads(str(golden(case.name)["metadata"]))["command"] == "python tools/make_golden.py quantised"
