"""Geometry of the paged KV cache: pages of 64 tokens, block tables from slots to pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpmrt.config import ModelConfig, SparseConfig
from cpmrt.config.engine import FP8
from cpmrt.errors import ConfigError

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
    sparse: SparseConfig | None = None
    is_fp8: bool = False

    @classmethod
    def of(cls, config: ModelConfig, max_context: int, max_sequences: int, kv_dtype: str = "auto") -> KVLayout:
        """`kv_dtype` as in `EngineConfig`."""
        return cls(
            config.num_layers, config.num_kv_heads, config.head_dim, max_context, max_sequences, config.sparse,
            kv_dtype == FP8,
        )  # fmt: skip

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

    def page_arrays(self, itemsize: int) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """What holds keys and values: name, shape, bytes of an element. In fp8 codes, and scales [layers, pages,
        kv_heads] (`ops.Fp8Pages`)."""
        if not self.is_fp8:
            return tuple((name, self.page_shape, itemsize) for name in ("k_pages", "v_pages"))
        codes = [(name, self.page_shape, 1) for name in ("k_codes", "v_codes")]
        return (*codes, *((name, self.page_shape[:3], 4) for name in ("k_scales", "v_scales")))

    def element_bytes(self, itemsize: int) -> int:
        """Bytes of a key's or value's element, where others have `itemsize`."""
        return 1 if self.is_fp8 else itemsize

    @property
    def compressed_shapes(self) -> dict[str, tuple[int, ...]]:
        """What sparse attention keeps beside them (`ops.CompressedKeys`): by name, [layers, pages, ...] too."""
        if self.sparse is None:
            return {}
        pages = (self.num_layers, self.num_pages, self.num_kv_heads)
        shapes = {"k1_pages": (*pages, 4, self.head_dim), "k2_pages": (*pages, self.head_dim)}
        return shapes | ({"nope_pages": self.page_shape} if self.sparse.use_nope else {})

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def check_table(self, block_table: Sequence[int]) -> None:
        """Raise ConfigError for a table that is too long or names a page that is not there."""
        most = self.pages_per_sequence
        if len(block_table) > most:
            raise ConfigError("block table", expected=f"at most {most} pages", actual=len(block_table))
        if block_table and not 0 <= min(block_table) <= max(block_table) < self.num_pages:
            actual = f"{min(block_table)} to {max(block_table)}"
            raise ConfigError("block table", expected=f"pages 0 to {self.num_pages - 1}", actual=actual)

    def block_tables(self) -> list[list[int]]:
        """Page numbers of each slot at first: its own run of pages."""
        count = self.pages_per_sequence
        return [list(range(slot * count, (slot + 1) * count)) for slot in range(self.max_sequences)]
