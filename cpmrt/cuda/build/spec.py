"""A kernel as data, and the compile-time sizes that it is built with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Protocol

    from _typeshed import DataclassInstance

    class FrozenSizes(DataclassInstance, Hashable, Protocol):
        """A frozen dataclass; one that is not frozen has no hash."""

    Constants = Mapping[str, int] | FrozenSizes
    """Compile-time sizes by their macro's name, or a frozen dataclass with a field for each of them."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One `extern "C" __global__` function of `kernels_cu`. The module that launches it declares it.

    `name` is without the `_bf16` / `_fp16` suffix. `op` is the op of `ops/spec.py` that the kernel computes or is a
    part of; one that belongs to none says why in `reason`. `constants` are the sizes that its file asks for under
    `#ifndef`: the dataclass that holds them, or the macros' names. `hot` promises no spills and no local memory. `arch`
    is the one architecture that the file compiles for, "" for all. `waits_across_blocks(sizes)` says whether blocks of
    different clusters wait for each other in a build with these compile-time sizes, so that all must be on the device
    at once. A block that arrives last and finishes what the others have left does not count as waiting.
    `has_wide_clusters(sizes)` says whether that build has clusters of sixteen blocks, more than every device promises.
    """

    name: str
    file: str
    op: str = ""
    constants: tuple[str, ...] | type[DataclassInstance] = ()
    hot: bool = False
    reason: str = ""
    arch: str = ""
    waits_across_blocks: Callable[[Mapping[str, int]], bool] | None = None
    has_wide_clusters: Callable[[Mapping[str, int]], bool] | None = None

    @property
    def macros(self) -> tuple[str, ...]:
        """The names of the compile-time sizes that every build has: not those that may be None."""
        if isinstance(self.constants, tuple):
            return self.constants
        return tuple(field.name.upper() for field in fields(self.constants) if field.default is not None)


def macros_of(constants: Constants) -> Mapping[str, int]:
    """Return the macros of these sizes: a field's name in upper case with its int; a field that is None has none."""
    return constants if isinstance(constants, Mapping) else _macros(constants)


# Every launch asks for these, and a model has few different sets of sizes.
@functools.cache
def _macros(constants: FrozenSizes) -> Mapping[str, int]:
    values = ((field.name.upper(), getattr(constants, field.name)) for field in fields(constants))
    return {name: int(value) for name, value in values if value is not None}
