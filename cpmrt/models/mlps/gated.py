"""The gated mlp: one fused product for gate and up, activation(gate) * up, and the down product.

The output of the last is added to the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.config.layers import GatedMlp
from cpmrt.models.layers import DOWN, GATE_UP, Names, Pass, Weights
from cpmrt.tensor_spec import BufferSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """The weights of one gated mlp."""

    norm: Any
    gate_up: Any
    down: Any
    fatrelu: float | None


def tensors(mlp: GatedMlp, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm, the fused gate and up projection, and the down projection."""
    hidden, inner = model.hidden_size, mlp.intermediate_size
    yield names.weight("mlp_norm", "post_attention_layernorm.weight", hidden)
    parts = ((f"mlp.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up"))
    yield names.fused("gate_up", *parts, product="gate_up")
    yield names.weight("down", "mlp.down_proj.weight", hidden, inner, product="residual")


def buffers(mlp: GatedMlp, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the rows between the two products."""
    yield BufferSpec("inner", (max_rows, mlp.intermediate_size), GATE_UP, DOWN)


def bind(mlp: GatedMlp, weights: Weights) -> GatedWeights:
    """Return the weights as `run` takes them."""
    return GatedWeights(weights["mlp_norm"], weights["gate_up"], weights["down"], mlp.fatrelu)


def run(step: Pass, bound: GatedWeights) -> None:
    """x += residual_scale * down(activation(gate(norm(x))) * up(norm(x)))."""
    inner, is_prefill = step.buffers["inner"], step.rows.is_prefill
    after = step.ops.gate_up(
        inner, step.x, bound.norm, bound.gate_up, step.eps, step.after, fatrelu=bound.fatrelu, is_prefill=is_prefill
    )
    step.ops.project_residual(step.x, inner, bound.down, None, step.residual_scale, after, is_prefill=is_prefill)
