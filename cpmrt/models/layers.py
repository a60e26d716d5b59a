"""The functions that each kind of mixer and mlp has, and what they work with: names, tables, buffers and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from cpmrt.config import ModelConfig
from cpmrt.config.layers import LayerConfig
from cpmrt.dtypes import F32, Array
from cpmrt.memory.caches import CacheSpec
from cpmrt.ops import NOTHING, Handoff, Ops, Rows
from cpmrt.tensor_spec import BufferSpec, Product, Source, TensorSpec

B = TypeVar("B")

# Phases of a forward pass, for buffer lifetimes; QKV to DOWN are those of a layer, and repeat with each layer.
EMBED, QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD = range(7)


@dataclass(frozen=True)
class Names:
    """The beginnings of a layer's weight names: `ours` in the arena, `theirs` in the checkpoint."""

    ours: str
    theirs: str

    def weight(
        self, name: str, source: str, *shape: int, product: Product | None = None, head_dim: int = 0
    ) -> TensorSpec:
        """Return the weight `name`, which is the checkpoint's tensor `source`."""
        return self.fused(name, (source, shape), product=product, head_dim=head_dim)

    def fused(
        self, name: str, *parts: tuple[str, tuple[int, ...]], product: Product | None = None, head_dim: int = 0
    ) -> TensorSpec:
        """Return the weight `name`: the rows of the checkpoint's tensors, each with its shape, one after another."""
        sources = tuple(Source(f"{self.theirs}{source}", shape) for source, shape in parts)
        shape = (sum(source.shape[0] for source in sources), *sources[0].shape[1:])
        return TensorSpec(f"{self.ours}{name}", shape, sources, product=product, head_dim=head_dim)


@dataclass(frozen=True)
class Table:
    """A buffer that is filled once, before the first step.

    `pieces` yields its values in the order of memory, a few at a time; the memory plan needs nothing but `spec`.
    """

    spec: BufferSpec
    pieces: Callable[[], Iterator[Array]]

    def parts(self, array: Any, stored: Callable[[F32], Array]) -> Iterator[tuple[Any, Array]]:
        """Yield each part of the buffer `array` (NumPy or CuPy), flat, with the flat values that belong there.

        `stored` turns float32 values into the words that the executor stores. It is applied if the buffer has the
        executor's type of activations.
        """
        flat, start = array.reshape(-1), 0
        for piece in self.pieces():
            values = piece.reshape(-1)
            yield flat[start : start + piece.size], stored(values) if self.spec.dtype is None else values
            start += piece.size


class Weights:
    """The arrays of one layer by short name; a weight that the architecture does not have is None."""

    def __init__(self, arrays: Mapping[str, Any], prefix: str):
        self._arrays, self._prefix = arrays, prefix

    def __getitem__(self, name: str) -> Any | None:
        return self._arrays.get(self._prefix + name)


class StepBuffers:
    """The workspace of one pass: buffers in `row_names` are cut to its number of rows, tables are whole."""

    def __init__(self, arrays: Mapping[str, Any], row_names: frozenset[str], num_rows: int, prefix: str = ""):
        self._arrays, self._row_names, self._num_rows, self._prefix = arrays, row_names, num_rows, prefix

    def of(self, kind: type[B]) -> B:
        """Return an instance of the dataclass `kind`, whose fields are named like buffers; an absent buffer is None."""
        return kind(**{field.name: self[field.name] for field in fields(kind)})  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any | None:
        array = self._arrays.get(self._prefix + name)
        return array[: self._num_rows] if array is not None and name in self._row_names else array


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of rows through the layers: the residual stream x [T, hidden], which they change in place, and the
    operands that all layers share."""

    ops: Ops
    x: Any
    rows: Rows
    buffers: StepBuffers
    eps: float
    residual_scale: float
    ahead: Any = None
    """The weight that is read first after the layer; the layer's last op may fetch parts of it."""
    after: Handoff = NOTHING
    """What the layer's mixer has left for its mlp."""


class Mixer(Protocol):
    """A module of `models/mixers`. `bind` turns arrays into the operands of `run`; the functions before need no arrays.
    """

    def tensors(self, layer: LayerConfig, model: ModelConfig, names: Names) -> Iterator[TensorSpec]:
        """Yield the weights of the layer's mixer, with the norm before it."""
        ...

    def caches(self, mixer: Any, kv_dtype: str) -> tuple[CacheSpec, ...]: ...

    def buffers(self, mixer: Any, max_rows: int) -> Iterator[BufferSpec]:
        """Yield the buffers of a pass, each with a row for every row of the pass."""
        ...

    def tables(self, mixer: Any, model: ModelConfig, max_context: int, limit: int) -> Iterator[Table]:
        """Yield the tables, computed once, for `max_context` positions; `limit`: the context that was asked for."""
        ...

    def bind(self, layer: LayerConfig, weights: Weights, caches: Mapping[str, Any]) -> Any: ...

    def run(self, step: Pass, layer: LayerConfig, bound: Any) -> Handoff:
        """x += residual_scale * mixer(norm(x)). Returns the handoff of its last op, which the mlp gets."""
        ...


class RestoringMixer(Mixer, Protocol):
    """A module of `models/mixers` that has caches of `on_accept` "restore"."""

    def restore(self, ops: Ops, arrays: Mapping[str, Any], accepted: Any) -> None:
        """Take the accepted rows of a chain of drafts into the states of all layers of this kind.

        `arrays` has caches and tables by name; `accepted`: as in `Ops.lightning_accept`.
        """
        ...


class Mlp(Protocol):
    """A module of `models/mlps`."""

    def tensors(self, mlp: Any, model: ModelConfig, names: Names) -> Iterator[TensorSpec]: ...

    def buffers(self, mlp: Any, max_rows: int) -> Iterator[BufferSpec]: ...

    def bind(self, mlp: Any, weights: Weights) -> Any: ...

    def run(self, step: Pass, bound: Any) -> None:
        """x += residual_scale * mlp(norm(x))."""
        ...
