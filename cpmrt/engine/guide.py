"""Guides: the tokens that one sequence under a grammar may sample next, while its steps are in flight.

The mask of a step needs the token before it. So the last step that was submitted may have an empty mask, which is
filled as soon as the step before it is done: the layers run meanwhile. Tokens that the grammar leaves no choice about
are not sampled one by one: a step that is submitted when they are known brings them along, a row each, and samples the
token behind them. A step that was submitted earlier has a mask that allows nothing but the first of them. Whether a
certain token comes by such a row, such a mask or a draft depends on what is in flight; it changes no bit of the answer.

A step that drafts is submitted when all tokens before it are known, and none is certain; or behind another such step
while no certain tokens are expected. Each node of its tree has the mask that plain decoding would have behind the
node's path. It comes from a guide of the node's own, a fork of its parent's (`GuidedTree`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import groupby
from typing import Protocol

from cpmrt.errors import FormError, MaskError
from cpmrt.executor import Mask, Path, TreeMasks

_STEADY_TOKENS = 8
"""The number of tokens in a row, none of them certain, after which another tree may be drafted before it is known
whether a certain token comes next. A plain step would bring all certain tokens, a tree few."""


class Matcher(Protocol):
    """Follows one answer through its grammar (`cpmrt.grammar`). Raises FormError where the answer cannot go on."""

    def allowed(self) -> bytes | None:
        """Return which tokens may come next, in the form of `Mask.bits`."""
        ...

    def prepare(self, others: Sequence[Matcher]) -> None:
        """Compute the results of `allowed` of this matcher and of `others`, at the same time where that is quicker."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the tokens that come next for certain."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on to the state behind these tokens."""
        ...

    def fork(self) -> Matcher:
        """Return a matcher in the same state, which goes its own way from there."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        ...


class Guide:
    """Gives the steps of one sequence their masks, and at most `max_run` certain tokens each (0: all are sampled).

    A token that ends the answer (`stop_ids`) is sampled even if it is certain.

    Where `matcher` fails, the steps in flight may sample anything, and `failure` says why their results do not count.
    Certain tokens that they bring do not count either, so how much of the answer comes before the error depends on the
    schedule.
    """

    def __init__(self, matcher: Matcher, max_run: int, stop_ids: Sequence[int] = ()):
        self._matcher, self._max_run, self._stop_ids = matcher, max_run, stop_ids
        self._mask: Mask | None = None
        """The mask of the step that was submitted last."""
        self._samples_certain = False
        """Whether that mask allows nothing but one certain token."""
        self._trees: deque[GuidedTree] = deque()
        """The trees of the draft steps in flight, oldest first, until their results are taken."""
        self._num_free = 0
        """Tokens taken since the last certain one."""
        self.failure: FormError | None = None
        self._ahead: tuple[int, ...] = ()
        """Certain tokens that submitted steps will bring."""
        self._certain: tuple[int, ...] = ()
        """Certain tokens behind `_ahead`, which no step brings yet. The matcher has accepted both."""

    @property
    def is_ready(self) -> bool:
        """Whether another step may be submitted."""
        return not self._trees and (self._mask is None or self._mask.is_filled)

    @property
    def may_draft_ahead(self) -> bool:
        """Whether a tree may be submitted behind trees in flight, since no certain token is expected there."""
        return bool(self._trees) and self._num_free >= _STEADY_TOKENS

    @property
    def is_complete(self) -> bool:
        """Whether the tokens that are taken are a whole answer that nothing can follow."""
        return not (self._ahead or self._certain or self.failure) and self._matcher.is_complete

    def next_mask(self) -> Mask:
        """Return the filled mask of the next step; all tokens before it are known."""
        self._mask = mask = Mask()
        self.fill()
        return mask

    def num_certain(self, room: int, *, is_known: bool) -> int:
        """Return how many certain tokens the next step may bring before the token that it samples.

        0 where nothing is left to sample behind them, since no step needs to bring them then. `is_known`: whether
        nothing is in flight. `room`: how many more tokens the sequence may get, behind those that are taken.
        """
        longest = min(room - len(self._ahead) - 1, self._max_run) if is_known or self._samples_certain else 0
        if longest <= 0 or not self._knows_certain() or self._matcher.is_complete:
            return 0
        tokens = self._certain[:longest]
        return next((number for number, token in enumerate(tokens) if token in self._stop_ids), len(tokens))

    def next_step(self, num_certain: int) -> tuple[Mask, tuple[int, ...]]:
        """Return the empty mask of the next step, and the `num_certain` certain tokens that it brings."""
        self._mask, self._samples_certain = Mask(), False
        brought, self._certain = self._certain[:num_certain], self._certain[num_certain:]
        self._ahead += brought
        if brought:
            self._num_free = 0
        return self._mask, brought

    @property
    def has_run(self) -> bool:
        """Whether the next step may bring certain tokens; asked when nothing is in flight."""
        return self._max_run > 0 and self._knows_certain()

    def tree_masks(self, room: int) -> TreeMasks:
        """Return the masks of the next step, which drafts. None but draft steps may be in flight.

        `room` as for `num_certain`.
        """
        if self._trees:
            self._trees[-1].leave_root()
        self._mask, self._samples_certain = Mask(), False
        self._trees.append(GuidedTree(self, room))
        return self._trees[-1].masks

    @property
    def bits(self) -> bytes | None:
        """The bits of the last step's mask, which is filled."""
        assert self._mask is not None
        return self._mask.bits

    def behind(self, token: int, room: int) -> Guide | None:
        """Return a fork of this guide for the step behind the next token, `token`, or None if no step comes there.

        The fork has an empty mask; this guide's own must be filled. `room`: how many tokens may follow `token`.
        """
        if self.failure or room <= 0 or token in self._stop_ids or not _allows(self.bits, token):
            return None
        fork = Guide(self._matcher.fork(), self._max_run, self._stop_ids)
        fork._ahead, fork._certain, fork._num_free = self._ahead, self._certain, self._num_free
        if fork.take((token,), room + 1) or fork.is_complete:
            return None
        fork._mask = Mask()
        return fork

    def take(self, token_ids: Sequence[int], room: int, *, is_drafted: bool = False) -> tuple[int, ...]:
        """Note the tokens that a step has brought, and return the certain tokens behind them if these end the answer.

        Mostly there are none. `room`: how many tokens the sequence might still get, these included.
        """
        if is_drafted:
            self._go_along(self._trees.popleft(), tuple(token_ids[:-1]))
            for tree in self._trees:
                tree.room = room - len(token_ids)
            token_ids, room = token_ids[-1:], room - len(token_ids[:-1])
        self._num_free += len(token_ids)
        known = len(self._ahead)
        if tuple(token_ids[:known]) != self._ahead[: len(token_ids)]:
            self.failure = MaskError.unexplained("a token was sampled that the mask of its row does not allow")
        self._ahead = self._ahead[len(token_ids) :]
        if self.failure is None and token_ids[known:]:
            try:
                self._matcher.accept(token_ids[known:])
            except FormError as error:
                self.failure = error
        if self._ahead or not (self._certain and self._max_run and self._matcher.is_complete):
            return ()
        room = max(room - len(token_ids), 0)
        rest, self._certain = self._certain[:room], self._certain[room:]
        return rest

    def fill(self) -> None:
        """Fill the mask of the last step, if it is empty: the token before it is known now."""
        fill_masks([self])

    def let_go(self) -> None:
        """Let the steps in flight sample anything, since their results do not count."""
        if self._mask is not None and not self._mask.is_filled:
            self._mask.fill(None)
        for tree in self._trees:
            tree.masks.let_go()
        self._trees.clear()
        self._mask, self._samples_certain = None, False
        self._ahead, self._certain = (), (*self._ahead, *self._certain)

    def _go_along(self, tree: GuidedTree, path: Path) -> None:
        """Take over the state of the tree's node at `path`, where the last token of the step was sampled."""
        node = tree.guides.get(path)
        if not self._trees:
            self._mask = None
        if node is None:
            self.failure = MaskError.unexplained("a draft was accepted that is cut")
        else:
            self._matcher, self.failure, self._num_free = node._matcher, node.failure, node._num_free
            self._ahead, self._certain = node._ahead, node._certain

    def _begin_fill(self) -> bool:
        """Fill the mask if it is empty and a certain token or a failure decides it; tell whether it is still empty."""
        if self._mask is None or self._mask.is_filled:
            return False
        if self._knows_certain():
            token, *rest = self._certain
            self._ahead, self._certain, self._samples_certain = (*self._ahead, token), tuple(rest), True
            self._num_free = 0
            self._mask.fill(_only(token))
        elif self.failure is None:
            return True
        else:
            self._mask.fill(None)
        return False

    def _end_fill(self) -> None:
        """Fill the mask with what the matcher allows."""
        assert self._mask is not None
        bits: bytes | None = None
        try:
            bits = self._matcher.allowed()
        except FormError as error:
            self.failure = error
        self._mask.fill(bits)

    def _knows_certain(self) -> bool:
        """Tell whether a certain token comes next, after asking the matcher if none is known."""
        if self._certain or self.failure:
            return self.failure is None
        try:
            self._certain = tuple(self._matcher.forced())
            if self._certain:
                self._matcher.accept(self._certain)
        except FormError as error:
            self.failure = error
        return bool(self._certain) and self.failure is None


def fill_masks(guides: Iterable[Guide]) -> None:
    """Fill the masks of the last steps of several sequences, as `Guide.fill` does for one.

    The matchers that leave a choice are asked together (`Matcher.prepare`).
    """
    choosing = [guide for guide in guides if guide._begin_fill()]
    if len(choosing) > 1:
        choosing[0]._matcher.prepare([guide._matcher for guide in choosing[1:]])
    for guide in choosing:
        guide._end_fill()


class GuidedTree:
    """The guides of a drafted tree's nodes by their paths, and the tree's masks, which these guides find.

    `root` is the guide of the root node. `room`: how many more tokens the sequence may get behind those that are taken.
    """

    def __init__(self, root: Guide, room: int):
        self.guides: dict[Path, Guide] = {(): root}
        self.masks = TreeMasks(find=self._find, prepare=self._fill_root)
        self.room = room

    def leave_root(self) -> None:
        """Keep a copy of the root's guide, which goes on to another tree before the result of this one is known."""
        self.guides[()] = copy(self.guides[()])

    def _fill_root(self) -> None:
        """Fill the root's mask. It depends on no drafted token, so this happens while the draft of the step runs."""
        self.guides[()].fill()

    def _find(self, paths: Sequence[Path]) -> dict[Path, bytes | None]:
        """Return the mask bits of every node that is left, by path; the others are cut.

        A path's parent, the path without its last token, must be among `paths` too.
        """
        self._fill_root()
        for _, level in groupby(sorted(paths, key=len), key=len):
            found = dict[Path, Guide]()
            for path in level:
                parent = self.guides.get(path[:-1])
                guide = parent.behind(path[-1], self.room - len(path)) if path and parent else None
                if guide is not None:
                    found[path] = guide
            fill_masks(found.values())
            self.guides.update({path: guide for path, guide in found.items() if guide.failure is None})
        return {path: guide.bits for path, guide in self.guides.items()}


def _allows(bits: bytes | None, token: int) -> bool:
    return bits is None or (token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1))


def _only(token: int) -> bytes:
    """Return the bits that allow one token. The bytes behind its own, which are 0, are left out."""
    return bytes(token // 8) + bytes([1 << token % 8])
