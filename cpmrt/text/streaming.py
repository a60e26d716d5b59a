"""Turns token ids into characters piece by piece, and ends text at a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from cpmrt.errors import RequestError
from cpmrt.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into text as they come: each character as soon as it is complete, none before.

    All pieces together are what `tokenizer.decode(prompt + output)` adds to the prompt's text, so a space in front of
    the first word is kept. Special tokens are left out, except those of `shown_ids`. Bytes that are not UTF-8 become
    U+FFFD once that is certain. A character that the prompt leaves unfinished belongs to the output. The cost of a
    token does not depend on those before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), shown_ids: frozenset[int] = frozenset()):
        self._tokenizer, self._shown_ids = tokenizer, shown_ids
        self._unfinished = b""
        """The bytes of a character that is not complete yet."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # an unfinished character has at most three bytes
                break
            tail = tokenizer.token_bytes(token_id) + tail
        self._at_start = not tail
        self._characters(tail)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete, "" inside a character. Raises RequestError on a negative id."""
        pieces: list[bytes] = []
        for token_id in token_ids:
            if token_id in self._shown_ids:
                pieces.append(self._tokenizer.written_bytes(token_id))
                continue
            pieces.append(self._tokenizer.token_bytes(token_id, first=self._at_start))
            self._at_start = self._at_start and not self._tokenizer.token_bytes(token_id)
        return self._characters(b"".join(pieces))

    def flush(self) -> str:
        """Return the rest after the last token: "", or one U+FFFD for a character that was never completed."""
        return self._characters(b"", final=True)

    def _characters(self, more: bytes, final: bool = False) -> str:
        raw = self._unfinished + more
        text, used = codecs.utf_8_decode(raw, "replace", final)
        self._unfinished = raw[used:]
        return text


class StopStrings:
    """Cuts text before the first stop string, and passes each character on as early as possible.

    The first match is the one that ends earliest, so it does not matter where the text is split into pieces; of several
    that end at the same character the longest counts.
    """

    def __init__(self, stop: tuple[str, ...]):
        self._automaton = stop_automaton(stop) if stop else None
        self._node = 0
        self._held = ""
        self.hit: str | None = None
        """The stop string that has ended the text."""

    def push(self, piece: str) -> tuple[str, bool]:
        """Return the text that may be shown now, and whether a stop string was hit, after which no more text comes."""
        automaton = self._automaton
        if self.hit or automaton is None:
            return ("", True) if self.hit else (piece, False)
        text, before = self._held + piece, len(self._held)
        node = self._node
        for index, char in enumerate(piece, before + 1):
            node = automaton.after(node, char)
            if automaton.longest[node]:
                begin = index - automaton.longest[node]
                self._held, self.hit = "", text[begin:index]
                return text[:begin], True
        self._node = node
        shown = len(text) - automaton.depth[node]
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Return the text still held back, now that no more will come; "" after a hit."""
        held, self._held, self._node = self._held, "", 0
        return held


class StopAutomaton:
    """Follows all stop strings at once (Aho and Corasick, 1975): constant work per character, on average.

    A node stands for a prefix of stop strings: the longest one that the text so far ends with. Node 0 is the empty
    prefix. `depth` is the length of each node's prefix, `longest` the length of the longest stop string that the prefix
    ends with, 0 if there is none. Time and memory to build it are proportional to the characters of all stop strings.
    """

    def __init__(self, stop: tuple[str, ...]):
        if not all(isinstance(text, str) and text for text in stop):
            raise RequestError("stop strings", expected="non-empty strings", actual=repr(stop))
        self.depth, self.longest = [0], [0]
        self._children: list[dict[str, int]] = [{}]
        for text in stop:
            self._insert(text)
        self._shorter = [0] * len(self.depth)
        """Node -> the node of the longest proper suffix of its prefix that is a prefix of a stop string too."""
        self._link()

    def after(self, node: int, char: str) -> int:
        """Return the node of the text that was at `node` and got one more character."""
        while (child := self._children[node].get(char)) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return child

    def _insert(self, text: str) -> None:
        node = 0
        for length, char in enumerate(text, 1):
            child = self._children[node].get(char)
            if child is None:
                child = self._children[node][char] = len(self.depth)
                self._children.append({})
                self.depth.append(length)
                self.longest.append(0)
            node = child
        self.longest[node] = len(text)

    def _link(self) -> None:
        """Set `_shorter`, shorter prefixes first, and add to `longest` the stop strings that end inside other ones."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            shorter = self._shorter[node]
            for char, child in self._children[node].items():
                self._shorter[child] = self.after(shorter, char)
                queue.append(child)
            self.longest[node] = self.longest[node] or self.longest[shorter]


@lru_cache(maxsize=32)
def stop_automaton(stop: tuple[str, ...]) -> StopAutomaton:
    """Return the automaton of these stop strings, which all sequences of a request and later requests share."""
    return StopAutomaton(stop)
