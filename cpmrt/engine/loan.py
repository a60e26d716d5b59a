"""A slot that the engine lends out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpmrt.engine.prefix_cache import HeldPages

if TYPE_CHECKING:
    from cpmrt.engine.engine import Engine


@dataclass(eq=False)
class Loan:
    """A slot for a caller that drives the executor itself, as for `Executor.prompt_logits`."""

    num_tokens: int
    """The number of tokens that its pages must hold."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens that the pages may begin with: those pages that the prefix cache knows are shared. Empty: all are new."""
    slot: int = -1
    """The slot; -1 while none is free."""
    pages: HeldPages | None = None
    """KV pages that come with the slot; None: it has its own, fixed ones."""

    @property
    def block_table(self) -> tuple[int, ...]:
        """The block table of the pages, as in `Admit`."""
        return self.pages.table if self.pages else ()


@contextmanager
def borrowed_slot(engine: Engine, num_tokens: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Lend a slot and its block table for a `with` block; if no slot is free, advance the engine until one is."""
    loan = engine.borrow(num_tokens)
    try:
        while loan.slot < 0:
            engine.advance()
        yield loan.slot, loan.block_table
    finally:
        engine.give_back(loan)
