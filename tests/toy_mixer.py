"""A mixer that is no attention: each channel of a sequence keeps one number, which decays and takes up every token.

    state = decay * state + norm(x);    x += residual_scale * project(state)

Its config, its functions and the NumPy body of its op, in one file: a kind of mixer needs no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpmrt.config import ModelConfig
from cpmrt.config.layers import LayerConfig, MixerConfig
from cpmrt.memory.caches import CacheSpec
from cpmrt.models.layers import OUTPUT, QKV, Names, Pass, Table, Weights
from cpmrt.ops import Handoff
from cpmrt.tensor_spec import BufferSpec, TensorSpec


@dataclass(frozen=True)
class Decaying(MixerConfig):
    """The config of a decaying mixer, whose state has `width` channels: the model's hidden size."""

    width: int
    decay: float = 0.75


@dataclass(frozen=True, slots=True)
class BoundDecaying:
    """The weights and the states [slots, width] of one layer."""

    norm: Any
    output: Any
    states: Any


def tensors(layer: LayerConfig, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
    """Yield the norm and the projection from the state back into the residual stream."""
    hidden = model.hidden_size
    yield names.weight("decaying_norm", "input_layernorm.weight", hidden)
    yield names.weight("decaying_output", "decaying.output.weight", hidden, hidden, product="residual")


def caches(mixer: Decaying, kv_dtype: str) -> tuple[CacheSpec, ...]:
    """Return the state of a slot, from which a rejected draft could not be removed."""
    return (CacheSpec("decaying", (mixer.width,), np.float32, scope="slot", on_accept=None, part="states"),)


def buffers(mixer: Decaying, max_rows: int) -> Iterator[BufferSpec]:
    """Yield the normalised rows, then the states after them."""
    yield BufferSpec("decayed", (max_rows, mixer.width), QKV, OUTPUT)


def tables(mixer: Decaying, model: ModelConfig, max_context: int, limit: int) -> Iterator[Table]:
    """Yield nothing: the mixer knows no positions."""
    return iter(())


def bind(layer: LayerConfig, weights: Weights, caches: Mapping[str, Any]) -> BoundDecaying:
    """Return weights and states as `run` takes them."""
    return BoundDecaying(weights["decaying_norm"], weights["decaying_output"], caches["decaying"])


def run(step: Pass, layer: LayerConfig, bound: BoundDecaying) -> Handoff:
    """Add residual_scale * project(state after each row) to x."""
    assert isinstance(layer.mixer, Decaying)
    rows = step.buffers["decayed"]
    step.ops.rms_norm(rows, step.x, bound.norm, step.eps)
    decay_rows(rows, bound.states, step.rows.slots, layer.mixer.decay)
    is_prefill = step.rows.is_prefill
    return step.ops.project_residual(step.x, rows, bound.output, None, step.residual_scale, is_prefill=is_prefill)


def decay_rows(rows: Any, states: Any, slots: Any, decay: float) -> None:
    """Take up the rows [T, width] one after another, each in the state of its slot, and replace it by that state."""
    for row, slot in zip(rows, slots, strict=True):
        states[slot] = np.float32(decay) * states[slot] + row
        row[:] = states[slot]
