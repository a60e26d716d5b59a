"""Small models for the oracle tests: their configs, their weights, and executors that run them.

Weights are a function of a seed, so the golden files need not hold them: `tools/make_golden.py` gives the same
arrays to Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.dtypes import F32, DType, round_to
from cpmrt.models.decoder import tensor_specs
from cpmrt.models.planning import plan_model, position_limit
from cpmrt.reference.executor import ReferenceExecutor
from cpmrt.reference.philox import philox
from cpmrt.tensor_spec import TensorSpec

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

_GAIN = {"embed_tokens": 2.0, "lm_head": 2.0, "markov_w1": 4.0}

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MINICPM: dict[str, Any] = LLAMA | {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 16, "mup_denominator": 32, "num_hidden_layers": 3,
}  # fmt: skip


def _uniform(name: str, shape: tuple[int, ...], seed: int) -> F32:
    """Return values in [-1, 1) from Philox words: i is word i % 4 of counter (i // 4, crc32 of the name, 0, 0)."""
    count = int(np.prod(shape))
    counters = np.zeros((-(-count // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1] = crc32(name.encode())
    words = philox(counters, seed).reshape(-1)[:count]
    unit = (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return unit.reshape(shape)


def random_weights(specs: Iterable[TensorSpec], seed: int) -> dict[str, F32]:
    """Return packed weights by name.

    Matrices keep the variance of what they multiply; norms lie around 1, biases around 0.
    """
    weights = {}
    for spec in specs:
        values = _uniform(spec.name, spec.shape, seed)
        if spec.name.endswith("norm"):
            values = np.float32(1.0) + np.float32(0.3) * values
        elif len(spec.shape) == 1:
            values = np.float32(0.5) * values
        else:
            values *= np.float32(_GAIN.get(spec.name, 1.0) * (3.0 / spec.shape[-1]) ** 0.5)
        weights[spec.name] = values
    return weights


def unpacked(specs: Iterable[TensorSpec], weights: Mapping[str, F32]) -> dict[str, F32]:
    """Return the tensors, by Hugging Face name, of the checkpoint that packs to `weights`."""
    tensors = {}
    for spec in specs:
        start = 0
        for source in spec.sources:
            tensors[source.name] = weights[spec.name][start : start + source.shape[0]]
            start += source.shape[0]
    return tensors


def loader(weights: Mapping[str, F32], dtype: DType) -> Callable[[Mapping[str, F32]], None]:
    """Return the function that `ReferenceExecutor` calls to fill its arrays with `weights`, rounded to `dtype`."""

    def load(arrays: Mapping[str, F32]) -> None:
        assert arrays.keys() == weights.keys()
        for name, array in arrays.items():
            array[:] = round_to(weights[name], dtype)

    return load


def make_executor(
    config: ModelConfig,
    weights: Mapping[str, F32] | None = None,
    *,
    seed: int = 0,
    dtype: DType = DType.FLOAT32,
    max_context: int | None = None,
    prefill_chunk: int = 16,
    max_sequences: int = 1,
) -> ReferenceExecutor:
    """Return a reference executor with these weights, or with random ones."""
    if weights is None:
        weights = random_weights(tensor_specs(config), seed)
    engine = EngineConfig(prefill_chunk=prefill_chunk, max_sequences=max_sequences, max_context=max_context)
    limit = position_limit(config, engine)
    plan = plan_model(config, engine, itemsize=4, max_context=limit)
    return ReferenceExecutor(config, plan, dtype, prefill_chunk, limit, loader(weights, dtype))
