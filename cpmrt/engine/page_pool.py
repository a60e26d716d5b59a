"""Which KV pages are free, held by sequences, or cached: held by nobody, with contents that may be wanted again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Reference counts of `num_pages` pages.

    When no page is free, the cached one that was used least recently is taken: `forget(page)` is called first and must
    `discard` that page; it may discard others too.
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
        """A page to write to, held once. There must be one that nobody holds."""
        if not self._free:
            self._forget(next(iter(self._cached)))
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page with contents."""
        assert page in self._kept, "only contents can be shared"
        self._holders[page] += 1
        self._cached.pop(page, None)

    def drop(self, page: int) -> None:
        """One holder less; after the last one the page is cached if it is kept, else free."""
        assert self._holders[page] > 0, "the page is not held"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if page in self._kept:
            self._cached[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """The contents of a held page may be wanted after its last holder."""
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """They are not wanted any more; a page that nobody holds is free."""
        self._kept.remove(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def touch(self, page: int) -> None:
        """Used just now: the last cached page to be taken."""
        if page in self._cached:
            self._cached.move_to_end(page)
