"""KV pages that outlive their sequence, found again by the tokens they hold.

A full page depends on its own tokens and on those of the pages before it, nothing else. So the pages form a tree: a
page's tokens are looked up among those that follow the page before. Python hashes the tokens' bytes (with a secret
key) and compares them whole, so no collision can give a page of other text, and none can be provoked from outside.

Where a sequence has a state beside its pages, a text can be resumed only behind a page where a snapshot of the state
was kept. Snapshots are kept at the last border of pages within each prompt; at the border where a prompt parts from an
earlier one, so that the third prompt with this beginning need not compute it; and, if answers are kept, at the last
border within an answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from cpmrt.engine.page_pool import PagePool
from cpmrt.executor import ExecutorLimits


@dataclass(eq=False)
class _Node:
    """One full page of some text; the root has none."""

    page: int = -1
    tokens: bytes = b""
    parent: _Node | None = None
    children: dict[bytes, _Node] = field(default_factory=dict)


@dataclass(eq=False)
class HeldPages:
    """The KV pages of one sequence: `table` has their numbers in the order of positions.

    The keys and values of the first `num_cached` tokens are computed already.
    """

    table: tuple[int, ...]
    num_cached: int
    path: list[_Node]
    """The tree's node of each full page so far. The node's page is another one than the table's if two sequences
    computed the same text at a time."""
    resumed: int | None = None
    """The snapshot with the state behind the cached tokens; None: the state begins at zero, or there is none."""
    borders: dict[int, int] = field(default_factory=dict)
    """The numbers of tokens after which the state is to be kept, each with the snapshot to keep it in until it is known
    to others."""
    last_border: int = 0
    """The largest border, even when it is no longer in `borders`; 0: the state is not kept."""
    answer: int | None = None
    """The snapshot for the state within the answer, written anew at each border of pages that the answer reaches."""
    answer_border: int = 0
    """The number of tokens after which `answer` is written last, unless the sequence ends before."""


class _Snapshots:
    """The owners of `count` snapshots: each belongs to a node, to a sequence that is about to write it, or to nobody.

    A snapshot may be taken while a step that reads it is on its way: steps that write it anew come after that.
    """

    def __init__(self, count: int):
        self._free = list(range(count))[::-1]
        self._kept: OrderedDict[_Node, int] = OrderedDict()

    def of(self, node: _Node) -> int | None:
        """Return the snapshot of the state behind a page, if there is one, and note that it is used."""
        if node in self._kept:
            self._kept.move_to_end(node)
        return self._kept.get(node)

    def take(self) -> int | None:
        """Return a snapshot to write to: a free or the least recently used one; None: all are about to be written."""
        if not self._free and self._kept:
            self._free.append(self._kept.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def put(self, node: _Node, snapshot: int) -> None:
        """Make a snapshot that was taken the one of the state behind a page; free it if that page has one already."""
        if self._kept.setdefault(node, snapshot) != snapshot:
            self._free.append(snapshot)

    def give_back(self, snapshot: int | None) -> None:
        """Free a snapshot that was taken and not put; None has no effect."""
        if snapshot is not None:
            self._free.append(snapshot)

    def forget(self, node: _Node) -> None:
        """Free the snapshot of a page that is dropped."""
        self.give_back(self._kept.pop(node, None))


class PrefixCache:
    """Gives pages to sequences and keeps what they computed.

    `num_pages` must be enough for all sequences that run at a time, each at its longest: then `acquire` always
    succeeds, since pages that nobody holds are free or can be dropped. With `is_on` False nothing is kept.
    `num_snapshots` is that of `ExecutorLimits`.
    """

    def __init__(self, num_pages: int, page_size: int, is_on: bool = True, num_snapshots: int = 0):
        self._page_size, self._is_on = page_size, is_on
        self._snapshots = _Snapshots(num_snapshots) if num_snapshots else None
        self._root = _Node()
        self._nodes: dict[int, _Node] = {}
        self.pool = PagePool(num_pages, self._forget)

    def acquire(self, prompt_ids: Sequence[int], num_tokens: int) -> HeldPages:
        """Return pages for `num_tokens` tokens that begin with the prompt. The prompt's last token is never cached: it
        gives the logits of the first new one."""
        path = self._known(prompt_ids, (len(prompt_ids) - 1) // self._page_size)
        parted = len(path) * self._page_size
        resumed = self._resumed(path)
        for node in path:
            self.pool.hold(node.page)
        num_new = -(-num_tokens // self._page_size) - len(path)
        table = (*(node.page for node in path), *(self.pool.take() for _ in range(num_new)))
        held = HeldPages(table, len(path) * self._page_size, path, resumed)
        if self._snapshots and self._is_on:
            self._reserve(held, max(len(prompt_ids) - 1, 0) // self._page_size * self._page_size, parted)
        return held

    def _reserve(self, held: HeldPages, *borders: int) -> None:
        """Take a snapshot for each border, a number of tokens, as long as there are any, the first border first."""
        assert self._snapshots is not None
        for border in borders:
            if border > held.num_cached and border not in held.borders:
                snapshot = self._snapshots.take()
                if snapshot is not None:
                    held.borders[border] = snapshot
        held.last_border = max(held.borders, default=0)

    def snapshot_within_answer(self, held: HeldPages, border: int) -> int | None:
        """Return the snapshot for the state behind `border` tokens of a sequence that decodes; None: there is none.

        It is kept if the sequence does not end before that many tokens are written.
        """
        if held.answer is None and self._snapshots:
            held.answer = self._snapshots.take()
        held.answer_border = border
        return held.answer

    def num_known(self, token_ids: Sequence[int]) -> int:
        """Return how many of the first tokens are in known pages. In a thread that does not drive the engine: a guess.
        """
        return len(self._known(token_ids, len(token_ids) // self._page_size)) * self._page_size

    def _known(self, token_ids: Sequence[int], most: int) -> list[_Node]:
        """Return the nodes of the first pages of a text, as far as these are known, and at most `most` of them."""
        path, node = list[_Node](), self._root
        for index in range(most):
            child = node.children.get(self._tokens(token_ids, index))
            if child is None:
                break
            path.append(node := child)
        return path

    def _resumed(self, path: list[_Node]) -> int | None:
        """Shorten the path to where a text can be resumed, and return the snapshot of the state there."""
        while self._snapshots and path:
            snapshot = self._snapshots.of(path[-1])
            if snapshot is not None:
                return snapshot
            path.pop()
        return None

    def keep(self, held: HeldPages, token_ids: Sequence[int], num_written: int) -> None:
        """Make the full pages of the first `num_written` tokens, which are computed, known to others.

        Where sequences have a state, only the pages up to the last border with a snapshot are of use to others.
        """
        if not self._is_on:
            return
        if held.answer is not None and 0 < held.answer_border <= num_written:
            held.borders[held.answer_border], held.answer = held.answer, None
            held.last_border = max(held.last_border, held.answer_border)
        if self._snapshots:
            num_written = min(num_written, held.last_border)
        path = held.path
        # These nodes are no longer in the tree: another sequence's page of the same text was dropped, and with it all
        # that followed it.
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
        for border in [border for border in held.borders if border <= len(path) * self._page_size]:
            assert self._snapshots is not None
            self._snapshots.put(path[border // self._page_size - 1], held.borders.pop(border))

    def release(self, held: HeldPages) -> None:
        """Give the pages back. Known pages stay cached, and the end of a text will be dropped before its start."""
        if self._snapshots:
            for snapshot in held.borders.values():
                self._snapshots.give_back(snapshot)
            self._snapshots.give_back(held.answer)
        for page in held.table:
            self.pool.drop(page)
        for node in reversed(held.path):
            if self._nodes.get(node.page) is node:
                self.pool.touch(node.page)

    def _tokens(self, token_ids: Sequence[int], index: int) -> bytes:
        start = index * self._page_size
        return array("q", token_ids[start : start + self._page_size]).tobytes()

    def _forget(self, page: int) -> None:
        """Drop a page from the tree, and all pages below it, which can no longer be reached."""
        top = self._nodes[page]
        assert top.parent is not None
        del top.parent.children[top.tokens]
        below = [top]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            del self._nodes[node.page]
            if self._snapshots:
                self._snapshots.forget(node)
            self.pool.discard(node.page)


def empty_cache(limits: ExecutorLimits, *, is_on: bool) -> PrefixCache | None:
    """Return the cache for the pages of an executor; None where its block tables are fixed."""
    if not limits.num_pages:
        return None
    return PrefixCache(limits.num_pages, limits.page_size, is_on, limits.num_snapshots)
