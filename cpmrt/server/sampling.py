"""The sampling fields that chat and plain completions share, as SamplingParams."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from cpmrt.config import SamplingParams
from cpmrt.server.errors import invalid
from cpmrt.server.fields import Fields, is_number

MAX_STOP = 16
MAX_CHOICES = 128
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_UNTIL_THE_CONTEXT_ENDS = 2**31 - 1


@dataclass(frozen=True)
class Wanted:
    """How a request is to be continued. `max_tokens` None: as far as the context goes.

    `sampling.seed` is always set; choice number i takes the seed plus i.
    """

    sampling: SamplingParams
    max_tokens: int | None
    num_choices: int

    def params(self, prompt_tokens: int, max_context: int, choice: int) -> SamplingParams:
        """Of one choice. Without room for a single token it asks for one, which the engine refuses by its figures."""
        room = max(1, max_context - prompt_tokens)
        assert self.sampling.seed is not None
        seed = (self.sampling.seed + choice) % 2**63
        return replace(self.sampling, max_new_tokens=self.max_tokens or room, seed=seed)


def read_wanted(fields: Fields, max_tokens: int | None, logprobs: int) -> Wanted:
    """Raises ApiError or RequestError. `logprobs`: how many of the best tokens are asked for."""
    if max_tokens is not None and max_tokens < 1:
        raise invalid("max_tokens", f"expected at least 1, got {max_tokens}")
    given = {name: fields.number(name) for name in _NUMBERS}
    numbers = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
    num_choices = fields.integer("n")
    if num_choices is not None and not 1 <= num_choices <= MAX_CHOICES:
        raise invalid("n", f"expected 1 to {MAX_CHOICES}, got {num_choices}")
    seed = fields.integer("seed")
    sampling = SamplingParams(
        max_new_tokens=max_tokens or _UNTIL_THE_CONTEXT_ENDS,
        top_k=max(0, fields.integer("top_k") or 0),  # others write -1 for "all"
        seed=secrets.randbits(63) if seed is None else seed % 2**63,
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=bool(fields.boolean("ignore_eos")),
        logprobs=logprobs,
        logit_bias=_logit_bias(fields),
        **numbers,
    )
    return Wanted(sampling, max_tokens, num_choices or 1)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise invalid("stop", "expected a non-empty string or an array of them")
    if len(texts) > MAX_STOP:
        raise invalid("stop", f"expected at most {MAX_STOP} strings, got {len(texts)}")
    return tuple(texts)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids") or []
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in ids):
        raise invalid("stop_token_ids", "expected an array of token ids")
    if len(ids) > MAX_STOP:
        raise invalid("stop_token_ids", f"expected at most {MAX_STOP} ids, got {len(ids)}")
    return tuple(ids)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, bias in (fields.mapping("logit_bias") or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and is_number(bias) and -100 <= bias <= 100):
            raise invalid("logit_bias", "expected token ids as keys and numbers in [-100, 100] as values")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)
