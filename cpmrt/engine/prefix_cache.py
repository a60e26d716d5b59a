"""KV pages that outlive their sequence, found again by the tokens they hold.

A full page depends on its own tokens and on those of the pages before it, nothing else. So the pages form a tree: a
page's tokens are looked up among those that follow the page before. Python hashes the tokens' bytes (with a secret
key) and compares them whole, so no collision can give a page of other text, and none can be provoked from outside.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from cpmrt.engine.page_pool import PagePool


@dataclass(eq=False)
class _Node:
    """One full page of some text; the root has none."""

    page: int = -1
    tokens: bytes = b""
    parent: _Node | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)


@dataclass(eq=False)
class HeldPages:
    """What one sequence holds: `table` in the order of its positions, whose first `num_cached` tokens are computed."""

    table: tuple[int, ...]
    num_cached: int
    path: list[_Node]
    """The tree's node of each full page so far. Its page is another one than the table's if two sequences computed
    the same text at a time."""


class PrefixCache:
    """Gives pages to sequences and keeps what they computed.

    `num_pages` must do for every sequence that runs at a time at its longest: then `acquire` always succeeds, since
    what nobody holds is free or can be dropped. `is_on` False keeps nothing.
    """

    def __init__(self, num_pages: int, page_size: int, is_on: bool = True):
        self._page_size, self._is_on = page_size, is_on
        self._root = _Node()
        self._nodes: dict[int, _Node] = {}
        self.pool = PagePool(num_pages, self._forget)

    def acquire(self, prompt_ids: Sequence[int], num_tokens: int) -> HeldPages:
        """Pages for `num_tokens` tokens that begin with the prompt. Its last token is never cached: it gives the
        logits of the first new one."""
        path, node = list[_Node](), self._root
        for index in range((len(prompt_ids) - 1) // self._page_size):
            child = node.children.get(self._tokens(prompt_ids, index))
            if child is None:
                break
            path.append(node := child)
        for node in path:
            self.pool.hold(node.page)
        num_new = -(-num_tokens // self._page_size) - len(path)
        table = (*(node.page for node in path), *(self.pool.take() for _ in range(num_new)))
        return HeldPages(table, len(path) * self._page_size, path)

    def keep(self, held: HeldPages, token_ids: Sequence[int], num_written: int) -> None:
        """Make the full pages of the first `num_written` tokens, which are computed, known to others."""
        if not self._is_on:
            return
        path = held.path
        # Another sequence's page of the same text was dropped, and with it all that followed it.
        while path and self._nodes.get(path[-1].page) is not path[-1]:
            path.pop()
        while (len(path) + 1) * self._page_size <= num_written:
            parent, index = path[-1] if path else self._root, len(path)
            tokens = self._tokens(token_ids, index)
            node = parent.children.get(tokens)
            if node is None:
                node = _Node(held.table[index], tokens, parent)
                parent.children[tokens] = self._nodes[node.page] = node
                self.pool.keep(node.page)
            path.append(node)

    def release(self, held: HeldPages) -> None:
        """Give the pages back; those that are known stay cached, the end of a text to be dropped before its start."""
        for page in reversed(held.table):
            self.pool.drop(page)
        for node in reversed(held.path):
            if self._nodes.get(node.page) is node:
                self.pool.touch(node.page)

    def _tokens(self, token_ids: Sequence[int], index: int) -> bytes:
        start = index * self._page_size
        return array("q", token_ids[start : start + self._page_size]).tobytes()

    def _forget(self, page: int) -> None:
        """Drop a page from the tree, and those that can no longer be reached without it."""
        top = self._nodes[page]
        assert top.parent is not None
        del top.parent.children[top.tokens]
        below = [top]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            del self._nodes[node.page]
            self.pool.discard(node.page)
