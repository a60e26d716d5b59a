"""Computes the bytes that one launch of a kernel must move, or its operations, to compare with its measured time."""

from __future__ import annotations

from typing import NamedTuple

from cpmrt.config import ModelConfig

Label = tuple[str, int, int]
"""A kernel's name, and columns and depth of its weight: 0 without a weight, or if the name alone identifies it."""


class Cost(NamedTuple):
    """The least work of one launch: the bytes that it reads and writes ("byte"), or its operations ("FLOP")."""

    title: str
    unit: str
    amount: float


def skinny_costs(config: ModelConfig) -> dict[Label, Cost]:
    """Return the costs of the products of a decode step: the bytes of their weights."""
    hidden, inner, q_size = config.hidden_size, config.mlp.intermediate_size, config.attention.q_size
    return {
        ("linear_qkv", 0, hidden): Cost("linear_qkv", "byte", 2.0 * (q_size + 2 * config.attention.kv_size) * hidden),
        ("linear_residual", 0, q_size): Cost("linear_residual (o)", "byte", 2.0 * hidden * q_size),
        ("linear_gate_up", 0, hidden): Cost("linear_gate_up", "byte", 4.0 * inner * hidden),
        ("linear_residual", 0, inner): Cost("linear_residual (down)", "byte", 2.0 * hidden * inner),
        ("linear_head", 0, hidden): Cost("linear_head", "byte", 2.0 * config.vocab_size * hidden),
    }


def packed_costs(config: ModelConfig, rows: int) -> dict[Label, Cost]:
    """Return the costs of products with packed weights (a 16-bit scale per 128), and of preparing their rows."""
    assert config.quantization is not None
    a_weight = config.quantization.bits / 8 + 2 / 128
    costs = {
        (label[0].replace("linear", "linear_packed"), *label[1:]): cost._replace(
            title=cost.title.replace("linear", "linear_packed"), amount=cost.amount / 2 * a_weight
        )
        for label, cost in skinny_costs(config).items()
        if label[0] != "linear_head"
    }
    for name, columns in (("hidden", config.hidden_size), ("inner", config.mlp.intermediate_size)):
        costs["prepare_rows", 0, columns] = Cost(f"prepare_rows ({name})", "byte", 4.0 * rows * columns)
    return costs


def product_costs(config: ModelConfig, rows: int, name: str) -> dict[Label, Cost]:
    """Return the costs of the products of a chunk, which are called `name`."""
    hidden, inner, q_size = config.hidden_size, config.mlp.intermediate_size, config.attention.q_size
    weights = {
        "qkv": (q_size + 2 * config.attention.kv_size, hidden),
        "o": (hidden, q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    return {
        (name, *sizes): Cost(f"{name} ({product})", "FLOP", 2.0 * rows * sizes[0] * sizes[1])
        for product, sizes in weights.items()
    }


def chunk_costs(config: ModelConfig, rows: int) -> dict[Label, Cost]:
    """Return the costs of the kernels between the products of a chunk; each reads and writes its rows once."""
    elements = {
        "embed": 2 * config.hidden_size,
        "rms_norm": 2 * config.hidden_size,
        "rope_append": 2 * (config.attention.q_size + 2 * config.attention.kv_size),
        "silu_mul": 3 * config.mlp.intermediate_size,
    }
    return {(name, 0, 0): Cost(name, "byte", 2.0 * rows * count) for name, count in elements.items()}
