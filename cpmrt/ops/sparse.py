"""Arrays of sparse attention: compressed keys in their pages, and the blocks that rows chose (`config.sparse`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpmrt.config import SparseConfig


@dataclass(frozen=True, slots=True)
class CompressedKeys:
    """Compressed keys of one layer, each in the page in which its window ends: a full page depends on its prefix only.

    k1_pages [P, K, 4, D]: row r of a sequence's page b is the mean of the keys of positions 64 b + 16 r - 16 ..
    64 b + 16 r + 15. k2_pages [P, K, D]: the mean of 64 b - 64 .. 64 b + 63. Rows whose window would begin before the
    text (row 0 of the first page in both) or has not ended yet hold anything.

    With `use_nope` the windows are over keys before RoPE, which `nope_pages` [P, K, S, D] hold, and `q_nope` [T, HD]
    are the queries before RoPE; else both are None.
    """

    k1_pages: Any
    k2_pages: Any
    q_nope: Any = None
    nope_pages: Any = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What each row looks at: blocks [T, K, W] int32, W = `config.num_selected`, block numbers in ascending order.

    Only rows with `config.leaves_out(position + 1)` have a list; what is in the others means nothing, they look at
    every block up to their own.
    """

    blocks: Any
    config: SparseConfig
