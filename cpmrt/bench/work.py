"""How much a step must compute and read at least: the yardstick of every measured number."""

from __future__ import annotations

from collections.abc import Iterable

from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.memory.kv_pages import KVLayout
from cpmrt.models.planning import weight_specs
from cpmrt.tensor_spec import TensorSpec


def decode_bytes(
    config: ModelConfig, context: int, rows: int, itemsize: int, tensors: Iterable[TensorSpec] | None = None
) -> int:
    """Bytes one decode step of `rows` sequences reads: every weight once, each sequence's keys and values once.

    The embedding table counts only where it is also the head; its few rows and all activations are left out.
    `tensors`: the weights as they are held (None: as config.json says).
    """
    sizes = {spec.name: spec.num_bytes(itemsize) for spec in tensors or weight_specs(config, EngineConfig())}
    if "lm_head" in sizes:
        del sizes["embed_tokens"]
    per_token = KVLayout.of(config, 1, 1).elements_per_token
    return sum(sizes.values()) + rows * context * per_token * itemsize


def prefill_flops(config: ModelConfig, num_tokens: int, start: int = 0) -> int:
    """Floating-point operations of `num_tokens` prompt tokens behind `start` cached ones, the head once."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    linear = 2 * num_tokens * config.num_layers * layer
    visible = num_tokens * start + num_tokens * (num_tokens + 1) // 2
    attention = 4 * config.num_layers * config.q_size * visible
    return linear + attention + 2 * config.hidden_size * config.vocab_size
