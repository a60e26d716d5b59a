"""How one request samples. The definition of each filter is in `cpmrt/reference/sampling.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from cpmrt.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; temperature 0 is greedy. Raises RequestError on a value out of range.

    `seed` None takes the engine's seed plus the number of the request, so a run repeats as a whole.
    `stop` strings end the text before them; `stop_token_ids` and the model's own end tokens end it too, unless
    `ignore_eos` drops the latter. `logprobs` = n asks for the chosen token's log-probability and the n best.
    `logit_bias` pairs token ids with what is added to their logits; not every executor takes it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(stop, str, "stop"))
        object.__setattr__(self, "stop_token_ids", _tuple_of(self.stop_token_ids, int, "stop_token_ids"))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in _RANGES:
            value = getattr(self, name)
            if name != "seed" or value is not None:
                _check_number(name, value)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("SamplingParams.ignore_eos", expected="a bool", actual=repr(self.ignore_eos))
        if any(not text for text in self.stop):
            raise RequestError("SamplingParams.stop", expected="non-empty strings", actual="an empty one")
        if any(token < 0 for token in self.stop_token_ids):
            raise RequestError("SamplingParams.stop_token_ids", expected="ids >= 0", actual=self.stop_token_ids)


_RANGES: dict[str, tuple[type, float, float, str]] = {
    "max_new_tokens": (int, 1, 2**31 - 1, "an integer >= 1"),
    "temperature": (float, 0.0, 1e6, "a number >= 0"),
    "top_k": (int, 0, 2**31 - 1, "an integer >= 0 (0: off)"),
    "top_p": (float, 1e-9, 1.0, "a number in (0, 1]"),
    "min_p": (float, 0.0, 1.0, "a number in [0, 1]"),
    "repetition_penalty": (float, 1e-3, 1e3, "a number in [0.001, 1000] (1: off)"),
    "presence_penalty": (float, -100.0, 100.0, "a number in [-100, 100]"),
    "frequency_penalty": (float, -100.0, 100.0, "a number in [-100, 100]"),
    "logprobs": (int, 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]"),
    "seed": (int, -(2**63), 2**64 - 1, "an integer of 64 bits"),
}


def _check_number(name: str, value: object) -> None:
    kind, low, high, expected = _RANGES[name]
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if ok and kind is int:
        ok = isinstance(value, int)
    if not ok or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(f"SamplingParams.{name}", expected=expected, actual=repr(value))


def _biases(pairs: object) -> tuple[tuple[int, float], ...]:
    """Checked pairs, in the order of their token ids. A dict counts as its items."""
    items = pairs.items() if isinstance(pairs, dict) else pairs
    checked: dict[int, float] = {}
    for pair in items if isinstance(items, Iterable) else [None]:
        token, bias = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
        is_token = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
        is_bias = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not (is_token and is_bias):
            raise RequestError(
                "SamplingParams.logit_bias", expected="token ids with numbers in [-100, 100]", actual=repr(pair)[:80]
            )
        checked[token] = float(bias)  # type: ignore[index, arg-type]
    return tuple(sorted(checked.items()))


def _tuple_of(values: object, kind: type, name: str) -> tuple[object, ...]:
    if not isinstance(values, (tuple, list, set, frozenset)):
        raise RequestError(f"SamplingParams.{name}", expected=f"a sequence of {kind.__name__}", actual=repr(values))
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise RequestError(f"SamplingParams.{name}", expected=f"only {kind.__name__}", actual=repr(values))
    return tuple(sorted(values)) if isinstance(values, (set, frozenset)) else tuple(values)
