"""Caches as data: the arrays that a layer keeps of a sequence, and how those of all layers lie in pages and slots.

A page is 64 tokens of one sequence in every layer; a block table maps a slot's runs of tokens to pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, TypeVar

import numpy as np

from cpmrt.dtypes import ElementType
from cpmrt.errors import ConfigError

PAGE_SIZE = 64
SNAPSHOTS_PER_SLOT = 4
"""The number of state snapshots for each slot: states behind prompts that other prompts may begin with."""
_SNAPSHOTS = ".snapshots"
Scope = Literal["page", "slot", "chain"]
OnAccept = Literal["move", "recompute", "restore", "encode"]
T = TypeVar("T")


def pages_for(num_tokens: int) -> int:
    """Return the number of pages that `num_tokens` tokens occupy."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One array that a layer keeps: `shape` for every page (scope page), for every slot (scope slot), or for every row
    of the drafts that are being verified (scope chain).

    `dtype` None means the executor's type of activations. `on_accept` says what happens to the cache when a path of a
    draft tree is accepted. `move`: its rows (tokens are the dimension before the last) move to the positions of the
    path. `recompute`: it is computed again from moved rows. `restore`: a recurrent state, which verification only
    reads, takes up the accepted rows of a chain from what was kept of them. `encode`: it gets the 8-bit codes that were
    kept of the path. None: a draft cannot be used with this cache. `part` is its row in the memory plan's table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ElementType | None = None
    scope: Scope = "page"
    on_accept: OnAccept | None = "move"
    part: str = "KV pages"

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of one token's keys or values; 0 for what is not kept token by token."""
        if self.part != "KV pages" or len(self.shape) < 2 or self.scope != "page":
            return 0
        return prod(self.shape) * (np.dtype(self.dtype).itemsize if self.dtype else itemsize) // PAGE_SIZE


@dataclass(frozen=True)
class CacheLayout:
    """The caches of `max_sequences` sequences of at most `max_context` tokens: `layers` lists those of each layer.

    Layers that keep a cache of the same name share one array [layers that have it, pages or slots, *shape], called
    `prefix` and the name. Page numbers are the same in every array. `chain_rows` is the number of draft rows that
    caches of scope chain have room for, at least the nodes of the largest tree; 0: there are no such caches.
    """

    layers: tuple[tuple[CacheSpec, ...], ...]
    max_context: int
    max_sequences: int
    prefix: str = ""
    chain_rows: int = 0

    @property
    def pages_per_sequence(self) -> int:
        return pages_for(self.max_context)

    @property
    def num_pages(self) -> int:
        return self.pages_per_sequence * self.max_sequences

    @cached_property
    def specs(self) -> dict[str, CacheSpec]:
        """The distinct caches by name, in the order in which layers name them."""
        found: dict[str, CacheSpec] = {}
        for layer in self.layers:
            for spec in self._kept(layer):
                if found.setdefault(spec.name, spec) != spec:
                    raise ValueError(f"layers disagree about the cache {spec.name}: {found[spec.name]}, {spec}")
        return found

    def _kept(self, layer: Sequence[CacheSpec]) -> tuple[CacheSpec, ...]:
        return tuple(spec for spec in layer if spec.scope != "chain" or self.chain_rows)

    def arrays(self) -> Iterator[tuple[CacheSpec, tuple[int, ...]]]:
        """Yield each distinct cache with the shape of its array."""
        places = {"page": self.num_pages, "slot": self.max_sequences, "chain": self.chain_rows}
        for spec in self.specs.values():
            count = sum(spec in layer for layer in self.layers)
            yield spec, (count, places[spec.scope], *spec.shape)

    def of_layer(self, layer: int, arrays: Mapping[str, T]) -> dict[str, T]:
        """Return a layer's own part of each array that it has, by the cache's name."""
        found = {}
        for spec in self._kept(self.layers[layer]):
            index = sum(spec in other for other in self.layers[:layer])
            found[spec.name] = arrays[self.prefix + spec.name][index]  # type: ignore[index]
        return found

    def snapshots(self) -> Iterator[tuple[str, CacheSpec, tuple[int, ...]]]:
        """Yield the array of snapshots of each cache of scope slot: its name, the cache, its shape."""
        for spec, (count, _, *shape) in self.arrays():
            if spec.scope == "slot":
                yield f"{spec.name}{_SNAPSHOTS}", spec, (count, self.num_snapshots, *shape)

    def states(self, arrays: Mapping[str, T]) -> list[tuple[T, T]]:
        """Return the caches of scope slot [layers, slots, ...], each with its snapshots [layers, snapshots, ...]."""
        return [(arrays[self.prefix + spec.name], arrays[self.prefix + name]) for name, spec, _ in self.snapshots()]

    def paged(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Return the arrays of all caches of scope page [layers, pages, ...], by their names."""
        names = [self.prefix + name for name, spec in self.specs.items() if spec.scope == "page"]
        return {name: arrays[name] for name in names}

    def moved(self, arrays: Mapping[str, T]) -> list[T]:
        """Return the arrays whose rows move when a path of a tree is accepted, all layers together."""
        return [arrays[self.prefix + name] for name, spec in self.specs.items() if spec.on_accept == "move"]

    @property
    def has_state(self) -> bool:
        """Whether a sequence has a state beside its pages: a prefix is resumable only where its state was kept."""
        return any(spec.scope == "slot" for spec in self.specs.values())

    @property
    def num_snapshots(self) -> int:
        """The number of snapshots of states, which outlive their sequences; 0 where a sequence is its pages alone."""
        return SNAPSHOTS_PER_SLOT * self.max_sequences if self.has_state else 0

    def bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token over all layers."""
        return sum(spec.bytes_per_token(itemsize) for layer in self.layers for spec in layer)

    def check_table(self, block_table: Sequence[int]) -> None:
        """Raise ConfigError for a table that is too long or names a page that is not there."""
        most = self.pages_per_sequence
        if len(block_table) > most:
            raise ConfigError("block table", expected=f"at most {most} pages", actual=len(block_table))
        if block_table and not 0 <= min(block_table) <= max(block_table) < self.num_pages:
            actual = f"{min(block_table)} to {max(block_table)}"
            raise ConfigError("block table", expected=f"pages 0 to {self.num_pages - 1}", actual=actual)

    def check_draft(self, *, has_chains_only: bool) -> None:
        """Raise ConfigError for a cache that cannot follow an accepted path of a draft tree."""
        for spec in self.specs.values():
            if spec.on_accept == "restore" and not has_chains_only:
                raise ConfigError(
                    f"draft trees cannot be used with the cache {spec.name}",
                    expected="chains of drafts, whose rows a recurrent state can follow",
                    actual="trees with branches",
                    fix="use prompt lookup (lookup) or a small model as the draft",
                )
            if spec.on_accept is None:
                raise ConfigError(
                    f"a draft cannot be used with the cache {spec.name}",
                    expected="a cache whose rows move or are made anew when a draft is accepted",
                    actual=f"on_accept={spec.on_accept!r}",
                    fix="run this model without a draft",
                )

    def block_tables(self) -> list[list[int]]:
        """Return the block table that each slot has at first: its own run of pages."""
        count = self.pages_per_sequence
        return [list(range(slot * count, (slot + 1) * count)) for slot in range(self.max_sequences)]
