"""What a model needs, as data: weight tensors with the checkpoint tensors they are packed from, and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint: Hugging Face name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A weight as the executor holds it: the row-wise concatenation of `sources` (usually one)."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A workspace buffer of one forward pass.

    It is live from the phase `first` to the phase `last`, both included: buffers whose lifetimes do not meet may
    share memory. `itemsize` None means the activation type.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    last: int
    itemsize: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)
