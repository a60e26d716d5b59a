"""KV pages and their holders. A page is free, held by sequences, or cached: nobody holds it, its contents are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Counts the holders of `num_pages` pages and gives out pages that nobody holds.

    When no page is free, it takes the cached one that was used least recently: it first calls `forget(page)`, which
    must `discard` that page and may discard others.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None]):
        self._forget = forget
        self._free = list(range(num_pages))[::-1]
        self._holders = [0] * num_pages
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages without contents."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages with contents that nobody holds."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds, each counted once."""
        return len(self._holders) - self.num_free - self.num_cached

    def take(self) -> int:
        """Return a page to write to, held once. There must be one that nobody holds."""
        if not self._free:
            self._forget(next(iter(self._cached)))
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a holder to a page whose contents are kept."""
        assert page in self._kept, "only contents can be shared"
        self._holders[page] += 1
        self._cached.pop(page, None)

    def drop(self, page: int) -> None:
        """Remove a holder; after the last one the page is cached if its contents are kept, else free."""
        assert self._holders[page] > 0, "the page is not held"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._kept:
            self._cached[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Note that the contents of a held page are to be kept after its last holder."""
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """Note that the contents of a page need not be kept any longer; a page that nobody holds becomes free."""
        self._kept.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def touch(self, page: int) -> None:
        """Note that a page was used just now: of the cached pages it will be taken last."""
        if page in self._cached:
            self._cached.move_to_end(page)
