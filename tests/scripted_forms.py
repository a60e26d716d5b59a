"""Made-up grammars for the scripted executor, and the tokens that any engine must give under them."""

from __future__ import annotations

import random
from copy import deepcopy
from zlib import crc32

from scripted import masked_token, plain_continuation

from cpmrt.config import Sampling
from cpmrt.engine import Request
from cpmrt.errors import FormError
from cpmrt.executor import ExecutorLimits

END = 49


class Automaton:
    """A made-up grammar whose allowed tokens are a hash of the answer so far: often a single one, at some length END.

    `fails_at` is the length of answer after which no token is allowed.
    """

    def __init__(self, number, fails_at=None):
        self.number, self.fails_at, self.tokens = number, fails_at, []
        self.prepared_at = None

    def _following(self, tokens):
        draw = random.Random(crc32(repr((self.number, tokens)).encode()))
        if len(tokens) >= draw.randrange(5, 60):
            return [END]
        return sorted(draw.sample(range(END), 1 if draw.random() < 0.6 else draw.randint(2, 20)))

    def following(self):
        return self._following(self.tokens)

    def prepare(self, others):
        """Note that masks of these matchers are found together; each must be asked for before its matcher goes on."""
        for each in (self, *others):
            assert each.prepared_at is None, "a matcher is prepared twice"
            each.prepared_at = len(each.tokens)

    def forced(self):
        tokens = list(self.tokens)
        while len(following := self._following(tokens)) == 1 and following != [END]:
            if self.fails_at is not None and len(tokens) >= self.fails_at:
                break
            tokens += following
        return tokens[len(self.tokens) :]

    def allowed(self):
        assert self.prepared_at in (None, len(self.tokens)), "a matcher is prepared, and goes on before it is asked"
        self.prepared_at = None
        if self.fails_at is not None and len(self.tokens) >= self.fails_at:
            raise FormError("nothing is allowed")
        bits = bytearray(7)
        for token in self.following():
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def accept(self, token_ids):
        for token in token_ids:
            assert token in self.following(), "a token that is not allowed"
            self.tokens.append(token)

    def fork(self):
        return deepcopy(self)

    @property
    def is_complete(self):
        return self.following() == [END]


def masked_continuation(prompt, number, seed, new, stop=()):
    """Return the (tokens, reason) that any engine must produce, computed by the shortest possible loop."""
    automaton, tokens = Automaton(number), list(prompt)
    for _ in range(new):
        token = masked_token(tokens, seed, automaton.following())
        automaton.accept([token])
        tokens.append(token)
        if automaton.is_complete or token in stop:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def request(prompt, number=None, *, new=40, seed=0, stop=(), fails_at=None, **others):
    matcher = None if number is None else lambda: Automaton(number, fails_at)
    return Request(tuple(prompt), Sampling(), seed, tuple(stop), new, matcher=matcher, **others)


def tokens_of(engine, seq):
    return [token for result in engine.stream(seq) for token in result.token_ids]


def limits(run_ahead=4, max_sequences=4, prefill_chunk=16, *, certain_rows=16, **others):
    return ExecutorLimits(
        max_sequences, 128, prefill_chunk, run_ahead=run_ahead, takes_masks=True, certain_rows=certain_rows, **others
    )


def expected(prompt, number, seed, new, stop):
    if number is None:
        return plain_continuation(prompt, seed, new, stop)
    return masked_continuation(prompt, number, seed, new, stop)[0]
