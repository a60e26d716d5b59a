"""Finds how deep the parts of a form refer to each other: llguidance goes as deep, and its stack ends.

A stack that overflows ends the process, so a form that is too deep must not reach llguidance.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cpmrt.config.form import FormKind
from cpmrt.errors import RequestError

MAX_LEVELS = 500
"""The most levels of rules or schemas that refer to each other. llguidance's stack takes about 2000 of the worst."""


@dataclass
class Part:
    """A rule or schema: `levels` is how deep it is nested itself, `others` are the names of those it refers to."""

    levels: int
    others: Sequence[Hashable]


Parts = Mapping[Hashable, Part]


def check_levels(kind: FormKind, levels: int) -> None:
    """Raise RequestError if a form has more levels than may reach llguidance."""
    if levels > MAX_LEVELS:
        names = "schemas" if kind == "json_schema" else "rules"
        expected = f"at most {MAX_LEVELS} levels of {names} that refer to each other"
        fix = f"write {names} out where they are used, in place of long chains or circles of them"
        raise RequestError(f"SamplingParams.{kind}", expected=expected, actual=levels, fix=fix)


def deepest(parts: Parts) -> int:
    """Return the most levels on a way from part to part. Parts that refer to each other in a circle count together."""
    levels = dict[Hashable, int]()
    for circle in _circles(parts):
        below = max((levels.get(other, 0) for name in circle for other in parts[name].others), default=0)
        total = sum(parts[name].levels for name in circle) + below
        levels.update(dict.fromkeys(circle, total))
    return max(levels.values(), default=0)


def _circles(parts: Parts) -> Iterator[list[Hashable]]:
    """Yield the parts in groups of those that refer to each other, each group after those that it refers to.

    This is Tarjan's algorithm, with a list in place of recursion.
    """
    number, lowest, pending = dict[Hashable, int](), dict[Hashable, int](), dict[Hashable, None]()
    for first in parts:
        way = [] if first in number else [(first, _begun(first, parts, number, lowest, pending))]
        while way:
            name, others = way[-1]
            other = next(others, None)
            if other is None:
                way.pop()
                if way:
                    lowest[way[-1][0]] = min(lowest[way[-1][0]], lowest[name])
                if lowest[name] == number[name]:
                    yield _taken(pending, name)
            elif other not in number:
                way.append((other, _begun(other, parts, number, lowest, pending)))
            elif other in pending:
                lowest[name] = min(lowest[name], number[other])


def _begun(
    name: Hashable, parts: Parts, number: dict[Hashable, int], lowest: dict[Hashable, int],
    pending: dict[Hashable, None],
) -> Iterator[Hashable]:  # fmt: skip
    """Give a part the next number, and return those that it refers to."""
    number[name] = lowest[name] = len(number)
    pending[name] = None
    return (other for other in parts[name].others if other in parts)


def _taken(pending: dict[Hashable, None], first: Hashable) -> list[Hashable]:
    """Take the last pending parts away, back to `first`, and return them."""
    taken = [pending.popitem()[0]]
    while taken[-1] != first:
        taken.append(pending.popitem()[0])
    return taken
