"""A slot that the engine lends out."""

from __future__ import annotations

from dataclasses import dataclass

from cpmrt.engine.prefix_cache import HeldPages


@dataclass(eq=False)
class Loan:
    """A slot for a caller that drives the executor itself, as for `Executor.prompt_logits`."""

    num_tokens: int
    """Tokens that its pages shall hold."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens with which they may begin: the pages of these that are known are shared. Empty: all pages are new."""
    slot: int = -1
    """The slot; -1 while none is free."""
    pages: HeldPages | None = None
    """KV pages that come with it; None: those of the slot."""

    @property
    def block_table(self) -> tuple[int, ...]:
        """The block table of the pages, as in `Admit`."""
        return self.pages.table if self.pages else ()
