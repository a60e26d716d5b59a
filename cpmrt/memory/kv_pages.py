"""Geometry of the paged KV cache: pages of 64 tokens, block tables from slots to pages."""

from __future__ import annotations

from dataclasses import dataclass

from cpmrt.config import ModelConfig

PAGE_SIZE = 64


def pages_for(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens occupy."""
    return -(-num_tokens // PAGE_SIZE)


@dataclass(frozen=True)
class KVLayout:
    """Sizes of the cache of `max_sequences` sequences of at most `max_context` tokens each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    max_sequences: int

    @classmethod
    def of(cls, config: ModelConfig, max_context: int, max_sequences: int) -> KVLayout:
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, max_context, max_sequences)

    @property
    def pages_per_sequence(self) -> int:
        return pages_for(self.max_context)

    @property
    def num_pages(self) -> int:
        return self.pages_per_sequence * self.max_sequences

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Keys (and as many values): [layers, pages, kv_heads, page size, head_dim]."""
        return (self.num_layers, self.num_pages, self.num_kv_heads, PAGE_SIZE, self.head_dim)

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def block_tables(self) -> list[list[int]]:
        """Page numbers of each slot: its own run of pages, fixed at the plan."""
        count = self.pages_per_sequence
        return [list(range(slot * count, (slot + 1) * count)) for slot in range(self.max_sequences)]
