"""The slots of an executor and the KV pages that come with them: which are free, and which are lent."""

from __future__ import annotations

from cpmrt.engine.loan import Loan
from cpmrt.engine.prefix_cache import HeldPages, empty_cache
from cpmrt.executor import ExecutorLimits


class Slots:
    """Gives out slots with pages, to sequences and as loans. With `uses_cache` False no pages are shared."""

    def __init__(self, limits: ExecutorLimits, *, uses_cache: bool):
        self._limits, self._uses_cache = limits, uses_cache
        self.clear()

    def clear(self) -> None:
        """Forget who holds what: all is free and nothing is known."""
        self.cache = empty_cache(self._limits, is_on=self._uses_cache)
        """Gives out the KV pages; None where the executor's block tables are fixed."""
        self._free = list(range(self._limits.max_sequences))[::-1]
        self._loans: dict[Loan, None] = {}

    @property
    def free(self) -> tuple[int, ...]:
        """The slots that nobody holds."""
        return tuple(self._free)

    @property
    def loans(self) -> tuple[Loan, ...]:
        """The loans that have a slot now."""
        return tuple(self._loans)

    @property
    def is_lending(self) -> bool:
        """Whether any slot is lent."""
        return bool(self._loans)

    def take(self, token_ids: tuple[int, ...], num_tokens: int) -> tuple[int, HeldPages | None]:
        """Return a free slot, and pages for so many tokens, of which the first may be known already."""
        slot = self._free.pop()
        return slot, self.cache.acquire(token_ids, num_tokens) if self.cache else None

    def put_back(self, slot: int) -> None:
        """Take back a slot. Its pages are released separately."""
        self._free.append(slot)

    def lend(self, loan: Loan) -> None:
        """Give a slot, with its pages, to a loan."""
        loan.slot, loan.pages = self.take(loan.prompt_ids, loan.num_tokens)
        self._loans[loan] = None

    def end(self, loan: Loan) -> bool:
        """Take back the slot and pages of a loan, and tell whether they were lent."""
        if loan not in self._loans:
            return False
        del self._loans[loan]
        self.put_back(loan.slot)
        if self.cache and loan.pages:
            self.cache.release(loan.pages)
        return True

    def keep(self, loan: Loan, token_ids: tuple[int, ...]) -> None:
        """Make the full pages of a loan, which hold these tokens by now, known to prompts that begin with them."""
        if self.cache and loan.pages:
            self.cache.keep(loan.pages, token_ids, len(token_ids))

    def num_known(self, token_ids: tuple[int, ...]) -> int:
        """Return how many of the first tokens are in known pages. In a thread that does not drive the engine: a guess.
        """
        return self.cache.num_known(token_ids) if self.cache else 0
