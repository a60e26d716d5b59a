"""The sampling settings of one request. Each filter is defined in `cpmrt/reference/sampling.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from cpmrt.config.form import Form, choice_texts, form_of, schema_text
from cpmrt.config.integers import integer, is_number
from cpmrt.config.sampling_defaults import SamplingDefaults
from cpmrt.errors import RequestError, quoted
from cpmrt.keywords import checks_fields

MAX_LOGPROBS = 20
LOWEST_TEMPERATURE = 1e-30
"""Logits divided by less than this could overflow float32: such a temperature is greedy decoding."""
LOWEST_TOP_P = 1e-9
"""The best of any vocabulary's tokens alone has more probability than this: such a top_p is greedy decoding."""


@checks_fields
@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of a request. Raises RequestError on a value out of range; numbers may be NumPy's.

    `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty` and `loop_penalty` None take the model's own
    (`SamplingDefaults`); temperature 0 is greedy, and so is top_p 0. With `max_new_tokens` None the answer goes on
    until the model ends it or the context is full. `seed` None takes a hash of the engine's seed and the number of the
    request, so a run repeats as a whole. The noise of a position depends on the seed and the position alone: requests
    with the same explicit seed have the same noise. `n` answers of one prompt have different seeds.

    The answer ends before a string of `stop`; `stop_token_ids` and the model's own end tokens end it too, unless
    `ignore_eos` drops the latter. `logprobs` = n asks for the log-probabilities of the chosen token and of the n best.
    `logit_bias` pairs token ids, on a GPU at most 300, with numbers that are added to their logits. `presence_penalty`
    is subtracted once from the logit of every token that the answer has, `frequency_penalty` as often as it is there.

    `loop_repeats` = n (0: off) ends an answer whose last tokens repeat one run n times, 128 tokens or more in all, with
    the reason "loop". With a `loop_penalty` above 1 the first loop raises the repetition penalty to that, and only the
    next one ends the answer. `max_thinking_tokens` closes a thought that is still open after that many tokens, with the
    model's own marker. Presence and frequency penalties count anew from where the repetition penalty was raised, after
    `max_thinking_tokens` tokens (even if no thought is open), and from where a `grammar_trigger` binds.

    One of these gives the answer a form, token by token: `json_schema` (a dict, its JSON text, a pydantic model or a
    dataclass), `regex`, `grammar` (in the syntax of Lark or GBNF) or `choices` (texts, of which one is the answer). A
    thought that the prompt opens, or that the answer may begin with since `max_thinking_tokens` is set, comes before
    the form. With `grammar_trigger` the answer is free until it says that text, with which the grammar begins.
    """

    max_new_tokens: int | None = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    loop_repeats: int = 0
    loop_penalty: float | None = None
    max_thinking_tokens: int | None = None
    n: int = 1
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    grammar_trigger: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _texts(stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in _RANGES:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _number(name, value))
        if self.loop_repeats == 1:
            raise RequestError("SamplingParams.loop_repeats", expected=_RANGES["loop_repeats"][-1], actual=1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("SamplingParams.ignore_eos", expected="a bool", actual=quoted(self.ignore_eos))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        if self.choices is not None:
            object.__setattr__(self, "choices", choice_texts(self.choices))
        _ = self.form  # raises RequestError where it is wrong

    @property
    def form(self) -> Form | None:
        """The form that the answer must have; None where it is free."""
        return form_of(self.json_schema, self.regex, self.grammar, self.choices, self.grammar_trigger)

    def with_defaults(self, defaults: SamplingDefaults | None = None) -> Sampling:
        """Return the sampling with the model's defaults (None: greedy) for the settings that are None."""
        own = defaults or SamplingDefaults()
        chosen = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        return Sampling(**{name: getattr(own, name) if value is None else value for name, value in chosen.items()})


@dataclass(frozen=True)
class Sampling:
    """The sampling of one sequence as an executor carries it out, without open values.

    `SamplingParams.with_defaults` makes it from checked values. A temperature that is too small to divide by becomes 0,
    greedy, and so does that beside a top_p that leaves only the best token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < LOWEST_TEMPERATURE or self.top_p < LOWEST_TOP_P:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p < LOWEST_TOP_P:
            object.__setattr__(self, "top_p", 1.0)


_RANGES: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "max_new_tokens": (int, 1, 2**31 - 1, "an integer from 1 to 2147483647, or none for as many as fit"),
    "temperature": (float, 0.0, 1e6, "a number in [0, 1000000]"),
    "top_k": (int, 0, 2**31 - 1, "an integer from 0 (off) to 2147483647"),
    "top_p": (float, 0.0, 1.0, "a number in [0, 1]"),
    "min_p": (float, 0.0, 1.0, "a number in [0, 1]"),
    "repetition_penalty": (float, 1e-3, 1e3, "a number in [0.001, 1000] (1: off)"),
    "presence_penalty": (float, -100.0, 100.0, "a number in [-100, 100]"),
    "frequency_penalty": (float, -100.0, 100.0, "a number in [-100, 100]"),
    "logprobs": (int, 0, MAX_LOGPROBS, f"an integer in [0, {MAX_LOGPROBS}]"),
    "seed": (int, -(2**63), 2**64 - 1, "an integer of 64 bits"),
    "loop_repeats": (int, 0, 1000, "0 (off) or an integer from 2 to 1000"),
    "loop_penalty": (float, 1.0, 1e3, "a number in [1, 1000] (1: off)"),
    "max_thinking_tokens": (int, 1, 2**31 - 1, "an integer from 1 to 2147483647, or none for no limit"),
}
_RANGES["n"] = (int, 1, 256, "an integer in [1, 256]")
_OPTIONAL = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "loop_penalty",
    "max_thinking_tokens",
)  # fmt: skip


def _number(name: str, value: Any) -> int | float:
    """Return a setting of any numeric type, also NumPy's, as Python's own. Raises RequestError out of its range."""
    kind, low, high, expected = _RANGES[name]
    if is_number(value, Integral if kind is int else Real):
        number = value if isinstance(value, int) else kind(value)  # an int may be too large for a float
        if low <= number <= high:
            return kind(number)
    raise RequestError(f"SamplingParams.{name}", expected=expected, actual=quoted(value))


def _biases(pairs: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs, checked and in the order of their token ids. A mapping counts as its items, None as empty."""
    if pairs is None:
        return ()
    try:
        items = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    except TypeError:  # as of an array without dimensions, which has __iter__
        items = [pairs]
    checked: dict[int, float] = {}
    for pair in items:
        token: Any
        bias: Any
        token, bias = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
        is_bias = is_number(bias, Real) and -100 <= bias <= 100
        if not (_is_token_id(token) and is_bias):
            raise RequestError(
                "SamplingParams.logit_bias", expected="token ids with numbers in [-100, 100]", actual=quoted(pair)
            )
        checked[int(token)] = float(bias)
    return tuple([(token, checked[token]) for token in sorted(checked)])


def _texts(values: object) -> tuple[str, ...]:
    return _members(values, "stop", "non-empty strings", lambda text: isinstance(text, str) and text != "")


def _token_ids(values: object) -> tuple[int, ...]:
    ids = _members(values, "stop_token_ids", "ids >= 0, below 2**31", _is_token_id)
    return tuple(int(token) for token in ids)


def _is_token_id(value: Any) -> bool:
    return integer(value, 0, 2**31 - 1) is not None


def _members(values: object, name: str, expected: str, is_valid: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return a list, tuple or set as a tuple; a set is sorted, so that equal settings are equal. None is empty."""
    if values is None:
        return ()
    if not isinstance(values, (tuple, list, set, frozenset)):
        raise RequestError(f"SamplingParams.{name}", expected=f"a list of {expected}", actual=quoted(values))
    if not all(map(is_valid, values)):
        raise RequestError(f"SamplingParams.{name}", expected=expected, actual=quoted(values))
    return tuple(sorted(values)) if isinstance(values, (set, frozenset)) else tuple(values)
