"""The running state of an admitted sequence: its position, the tokens that it has given, whether it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cpmrt.dtypes import F32, Array
from cpmrt.executor import Admit, TokenLogprobs
from cpmrt.reference.sampling import sample, token_logprobs


@dataclass
class Running:
    """A sequence that holds a slot. Its tokens are at positions 0 .. `position`; the last one is not cached yet."""

    admit: Admit
    seen: Array = field(repr=False)
    """bool [V]: the tokens that are in the prompt or were generated."""
    counts: Array = field(repr=False)
    """int32 [V]: how often each token was generated."""
    position: int = 0
    last_token: int = -1
    num_generated: int = 0
    finished: bool = False

    @classmethod
    def start(cls, admit: Admit, vocab_size: int) -> Running:
        return cls(admit, np.zeros(vocab_size, bool), np.zeros(vocab_size, np.int32))

    def sample(self, logits: F32) -> int:
        """Sample and return the token for `position`, which becomes the last one."""
        admit = self.admit
        token = sample(logits, admit.sampling, admit.seed, self.position, self.seen, self.counts)
        self.generated(token)
        return token

    def generated(self, token: int) -> None:
        """Note that `token` is the next one of the answer."""
        self.seen[token] = True
        self.counts[token] += 1
        self.last_token = token
        self.num_generated += 1
        self.finished = token in self.admit.stop_token_ids or self.num_generated == self.admit.max_new_tokens

    def logprobs(self, logits: F32, token: int) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of a token as one entry, or nothing if the request does not ask for them."""
        count = self.admit.sampling.logprobs
        return (token_logprobs(logits, token, count),) if count else ()
