"""Blocks of GGUF files in packed products: every type beside the reference, mixtures, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import TypeOf, write_pair
from reference.golden_models import relative

from cpmrt import LLM, SamplingParams
from cpmrt.cuda.ops.linear_packed.layout import width_of
from cpmrt.errors import CheckpointError
from cpmrt.weights.formats.blocks import BLOCK_TYPES

SETTINGS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128}
TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3}
LONG = np.random.default_rng(0).integers(3, 259, 180).tolist()
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.9, seed=5, ignore_eos=True)


def mixed(name: str) -> str:
    """Return the type of a matrix in a mixture of 6 and 4 bits like Q4_K_M's, with the embedding in 4."""
    return "Q6_K" if "attn_v" in name or "ffn_down" in name or name.startswith("output") else "Q4_K"


def check(folder: Path, architecture: str, type_of: TypeOf, dtype: str) -> None:
    path = write_pair(folder, architecture, type_of).gguf
    found = {}
    for executor in ("cuda", "reference"):
        with LLM(path, executor=executor, dtype=dtype, **SETTINGS) as llm:
            found[executor] = llm.logits(LONG[:40]), llm.logits(LONG)
            if executor == "cuda":
                packed = [spec for spec in llm.plan.tensors if spec.quant is not None]
                assert {width_of(spec.quant)[0] for spec in packed} <= {2, 4, 8}
                assert len(packed) == 2 * 4 + 1 or type_of is mixed
    for ours, theirs in zip(*found.values(), strict=True):
        assert relative(ours, theirs) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_block_type(tmp_path: Path, kind: str) -> None:
    check(tmp_path, "minicpm", lambda name: kind, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "minicpm", "qwen3"])
def test_mixed_types(tmp_path: Path, architecture: str) -> None:
    check(tmp_path, architecture, mixed, "float16")


@pytest.mark.gpu
def test_matrices_in_16_bits_beside_others(tmp_path: Path) -> None:
    path = write_pair(tmp_path, "llama", lambda name: "F16" if "attn_k" in name else "Q4_0").gguf
    with LLM(path, executor="cuda", dtype="float16", **SETTINGS) as llm:
        held = {spec.name: spec.quant is not None for spec in llm.plan.tensors}
        found = llm.logits(LONG)
    assert not held["layers.0.qkv"] and held["layers.0.gate_up"]
    with LLM(path, executor="reference", dtype="float16", **SETTINGS) as llm:
        assert relative(found, llm.logits(LONG)) < TOLERANCE["float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixed", "Q4_0", "Q4_K", "Q2_K", "Q3_K"])
def test_a_request_alone_gives_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """A request alone gives the tokens that it gives among others.

    A single row takes a layer's products in one launch if their weights are of one 4-bit kind.
    """
    path = write_pair(tmp_path, "llama", mixed if kind == "mixed" else lambda name: kind).gguf
    prompts = [LONG[start : start + length] for start, length in ((0, 5), (9, 64), (20, 65), (40, 140))]
    with LLM(path, executor="cuda", max_sequences=8, dtype="bfloat16", **SETTINGS) as llm:
        streams = [llm.stream(prompt, SAMPLED) for prompt in prompts]
        together = [stream.finish().token_ids for stream in streams]
    with LLM(path, executor="cuda", dtype="bfloat16", **SETTINGS) as llm:
        assert [llm.generate(prompt, SAMPLED).token_ids for prompt in prompts] == together


@pytest.mark.gpu
def test_a_scale_beyond_float16_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, "llama", lambda name: "Q8_0").gguf
    data = bytearray(path.read_bytes())
    data[-34:-32] = np.float16([np.inf]).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has scales that are not finite"):
        LLM(path, executor="cuda", dtype="float16", **SETTINGS)
