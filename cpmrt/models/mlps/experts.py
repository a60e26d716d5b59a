"""The mixture of experts: a router chooses gated mlps for each row; their outputs are added, each times its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import ExpertsMlp
from cpmrt.models.layers import DOWN, GATE_UP, Names, Pass, Weights
from cpmrt.ops import Routing
from cpmrt.tensor_spec import BufferSpec, TensorSpec


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of one mixture of experts; those of the experts are stacked."""

    norm: Any
    router: Any
    gate_up: Any
    down: Any


def tensors(mlp: ExpertsMlp, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm, the router [E, C], the gates and then the ups of all experts [2EF, C], their downs [EC, F]."""
    hidden, inner, experts = model.hidden_size, mlp.intermediate_size, range(mlp.num_experts)
    yield names.weight("mlp_norm", "post_attention_layernorm.weight", hidden)
    yield names.weight("router", "mlp.gate.weight", mlp.num_experts, hidden)
    parts = ((f"mlp.experts.{expert}.{part}.weight", (inner, hidden)) for part in ("w1", "w3") for expert in experts)
    gate_up = names.fused("experts_gate_up", *parts, product="gate_up")
    downs = ((f"mlp.experts.{expert}.w2.weight", (hidden, inner)) for expert in experts)
    down = names.fused("experts_down", *downs, product="residual")
    yield from (replace(spec, num_experts=mlp.num_experts) for spec in (gate_up, down))


def buffers(mlp: ExpertsMlp, max_rows: int) -> Iterator[BufferSpec]:
    """Yield each row's experts with their shares, and the columns between the two products, expert by expert."""
    chosen = mlp.experts_per_token
    yield BufferSpec("experts", (max_rows, chosen), GATE_UP, DOWN, np.int32)
    yield BufferSpec("shares", (max_rows, chosen), GATE_UP, DOWN, np.float32)
    yield BufferSpec("experts_inner", (max_rows, chosen * mlp.intermediate_size), GATE_UP, DOWN)


def bind(mlp: ExpertsMlp, weights: Weights) -> ExpertsWeights:
    """Return the weights as `run` takes them."""
    return ExpertsWeights(*(weights[name] for name in ("mlp_norm", "router", "experts_gate_up", "experts_down")))


def run(step: Pass, bound: ExpertsWeights) -> None:
    """x += residual_scale * the sum over a row's experts of share * down(silu(gate(norm(x))) * up(norm(x)))."""
    ops, rows, inner = step.ops, step.rows, step.buffers["experts_inner"]
    routing = step.buffers.of(Routing)
    after = ops.route(routing, step.x, bound.norm, bound.router, step.eps, rows)
    after = ops.experts_gate_up(
        inner, step.x, bound.norm, bound.gate_up, step.eps, routing, after, down=bound.down, is_prefill=rows.is_prefill
    )
    ops.experts_down(
        step.x, inner, bound.down, step.residual_scale, routing, after, ahead=step.ahead, is_prefill=rows.is_prefill
    )
