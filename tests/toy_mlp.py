"""An mlp that is a single matrix: x += residual_scale * matrix(norm(x)). All that it needs is in this file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpmrt.config import ModelConfig
from cpmrt.config.layers import MlpConfig
from cpmrt.models.layers import DOWN, GATE_UP, Names, Pass, Weights
from cpmrt.tensor_spec import BufferSpec, TensorSpec


@dataclass(frozen=True)
class SingleMatrix(MlpConfig):
    """The config of an mlp of a single matrix; `width` is the model's hidden size."""

    width: int


@dataclass(frozen=True, slots=True)
class BoundMatrix:
    """The weights of one layer."""

    norm: Any
    matrix: Any


def tensors(mlp: SingleMatrix, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm and the matrix."""
    yield names.weight("single_norm", "post_attention_layernorm.weight", model.hidden_size)
    yield names.weight("single", "mlp.single.weight", model.hidden_size, mlp.width, product="residual")


def buffers(mlp: SingleMatrix, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the normalised rows."""
    yield BufferSpec("single_rows", (max_rows, mlp.width), GATE_UP, DOWN)


def bind(mlp: SingleMatrix, weights: Weights) -> BoundMatrix:
    """Return the weights as `run` takes them."""
    return BoundMatrix(weights["single_norm"], weights["single"])


def run(step: Pass, bound: BoundMatrix) -> None:
    """Add residual_scale * matrix(norm(x)) to x."""
    rows = step.buffers["single_rows"]
    step.ops.rms_norm(rows, step.x, bound.norm, step.eps)
    step.ops.project_residual(step.x, rows, bound.matrix, None, step.residual_scale)
