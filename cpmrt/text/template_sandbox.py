"""The sandbox that chat templates run in: they are programs from the network, so their access and work are limited.

Jinja's immutable sandbox keeps them from Python's internals and from the caller's data. On top of it loops and
calls are counted, and every value a template makes is measured before it is kept, so that neither a nest of
loops nor a string that doubles itself costs more than a fixed multiple of the conversation's size.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cpmrt.text.marks import Marks
from cpmrt.text.template_allowance import Allowance, LimitError
from cpmrt.text.template_instrument import Instrument

_TURN_COST = 128  # what one turn of a loop or one call counts, in characters
_MAX_ARGUMENT = 100_000  # largest width or count that the functions and filters of _SIZED take
_SIZED = {"safe_range", "center", "ljust", "rjust", "zfill", "batch", "slice", "round", "truncate", "to_bytes"}
_MAX_INT_BITS = 4096
_MAX_FORMATTED = 10_000  # most characters of one formatted number, as widths of five digits are refused
_REFUSED_FILTERS = {"wordwrap", "urlize", "xmlattr", "pprint", "striptags"}
_REFUSED_METHODS = {"expandtabs", "translate", "encode", "format_map"}
_LOOK_UPS = {"get", "index", "count"}  # methods of dicts, lists and tuples that compare their first argument
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})|\{[^}]*(\{|\d{5})")


class Current(threading.local):
    """The marks of the conversation that is being rendered in this thread; None if no text is marked."""

    marks: Marks | None = None


class ChatNamespace(Namespace):
    """The `namespace()` of templates. It refuses private names and other namespaces as values."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self)
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} starts with an underscore")
        if isinstance(value, Namespace):
            raise SecurityError("a namespace may not be kept inside another value")
        super().__setitem__(name, value)


class Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks tokens for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """A Jinja environment as Hugging Face's chat templates expect it, with bounds on time and memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,
            finalize=self._written,
        )
        self.allowance = Allowance()
        self.current = Current()
        del self.globals["lipsum"]
        self.globals["namespace"] = ChatNamespace
        self.tests = {name: self._bounded_test(test) for name, test in self.tests.items()}
        self.filters = {
            name: self._bounded_filter(name, function)
            for name, function in self.filters.items()
            if name not in _REFUSED_FILTERS
        }

    def concat(self, parts: Iterable[str]) -> str:
        return str(self.join_text(*parts))

    def join_text(self, *parts: object) -> str:
        """Implement the operator `~`."""
        texts = [self._written(self.allowance.keep(part)) for part in parts]
        self._fits(sum(map(len, texts)))
        return "".join(texts)

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter whose arguments and result are bounded like those of Jinja's own filters."""
        self.filters[name] = self._bounded_filter(name, function)

    def turn(self) -> None:
        """Count one turn of a loop, or one call."""
        self.allowance.spend(_TURN_COST)

    def keep(self, value: Any) -> Any:
        """Measure and count a list, tuple, dict or slice that the template makes, and return it."""
        return self.allowance.keep(value)

    def unmarked(self, value: Any) -> Any:
        """Return a value without marks, as comparisons and look-ups of the template have to see it."""
        marks = self.current.marks
        return value if marks is None else marks.removed(value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]`; keys of dicts are compared without marks."""
        plain = self.unmarked(argument)
        if isinstance(obj, dict):
            with suppress(TypeError, KeyError):  # no such key: it may be a method of `obj` with its marks
                return obj[plain] if plain in obj else self._comparable(obj)[plain]
        return super().getitem(obj, plain)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`. For a dict it is the value of that key, unless a method has the name."""
        is_key = isinstance(obj, dict) and not hasattr(obj, attribute)
        return self.getitem(obj, attribute) if is_key else super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out a call in a template, with bounds on its arguments and its result. Jinja sends every call here."""
        self = __self
        if getattr(__obj, "__self__", None) is self:
            return __obj(*args)
        self.turn()
        name, own = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        args = _countable(args) if name == "join" else args
        self._check_arguments(name, own, args, kwargs)
        call = super().call
        if name in _LOOK_UPS and isinstance(own, (dict, list, tuple)):
            args = (*map(self.unmarked, args[:1]), *args[1:])
            made = call(__context, getattr(self._comparable(own), name), *args, **kwargs)
        elif isinstance(own, str):
            made = self._carried(lambda own, *rest, **named: call(__context, getattr(own, name), *rest, **named),
                                 (own, *args), kwargs)  # fmt: skip
        else:
            made = call(__context, __obj, *args, **kwargs)
        return self.allowance.keep(made)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `+`, `*`, `**` or `%`. Raises LimitError first if the result would be too large."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise LimitError("it makes a number of more than a thousand digits")
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            if not isinstance(value, float):
                self._fits(max(count, 0) * (len(value) if isinstance(value, str) else self.allowance.measure(value)))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        elif operator == "+":
            self._fits(self.allowance.measure(left) + self.allowance.measure(right))
        compute = super().call_binop
        if operator == "%":
            return self.allowance.keep(self._carried(compute, (context, operator, left, right), {}))
        return self.allowance.keep(compute(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, beside what Jinja refuses, string methods whose result can be far larger than their arguments."""
        if isinstance(obj, str) and attr in _REFUSED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a wrapper of `str.format` that checks the widths in the format first; None for another callable."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__, [*args, *kwargs.values()])
            return str(self._carried(wrapped, args, kwargs))

        return bounded

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(Instrument().visit(source), *args, **kwargs)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)  # keeps jinja's mark for functions that want the context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            args = _countable(args) if name == "join" else args
            own, *rest = args[1:] if takes_context else args
            self._check_arguments(name, own, tuple(rest), kwargs)
            return self.allowance.keep(self._carried(function, args, kwargs))

        return bounded

    def _bounded_test(self, test: Any) -> Callable[..., Any]:
        @wraps(test)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.allowance.spend(1)
            return self._carried(test, args, kwargs)

        return bounded

    def _check_arguments(self, name: str, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise LimitError for a call whose arguments or result are too large. `own` is the value it works on."""
        given = [*args, *kwargs.values()]
        size = self.allowance.measure(own) + sum(self.allowance.measure(value) for value in given)
        if name in _SIZED and any(isinstance(value, int) and abs(value) > _MAX_ARGUMENT for value in given):
            raise LimitError(f"it calls {name} with a number above {_MAX_ARGUMENT}")
        if name == "replace" and isinstance(own, str) and len(given) > 1:
            self._fits(len(own) + own.count(str(given[0])) * len(str(given[1])))
        elif name == "join" and given:
            parts, separator = (given[0], own) if isinstance(own, str) else (own, str(given[0]))
            self._fits(size + (len(parts) if hasattr(parts, "__len__") else 0) * len(separator))
        elif name == "indent":
            width = given[0] if given else 4
            unit = width if isinstance(width, int) else len(str(width))
            self._fits(size + unit * (str(own).count("\n") + 1))
        elif name == "tojson":
            self._fits(size * sum(value if isinstance(value, int) else 1 for value in given))
        elif name == "format":
            self._check_format(str(own), given)
        elif name == "sum" and not all(isinstance(value, (int, float, str, type(None))) for value in given):
            raise LimitError("it sums up lists")

    def _check_format(self, text: str, values: object) -> None:
        if _WIDTH.search(text):
            raise LimitError("it formats with a width of its own or one above 9999")
        count = text.count("%") + text.count("{")
        self._fits(len(text) + count * (self.allowance.measure(values) + _MAX_FORMATTED))

    def _carried(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        marks = self.current.marks
        return function(*args, **kwargs) if marks is None else marks.carried(function, _countable(args), kwargs)

    def _comparable(self, own: Any) -> Any:
        """Return a dict with unmarked keys (its values keep their marks), or a list or tuple with unmarked items."""
        marks = self.current.marks
        if marks is None or not isinstance(own, dict):
            return self.unmarked(own)
        return {marks.removed(key): value for key, value in own.items()}

    def _written(self, value: Any) -> str:
        """Return the text that the template writes for a value."""
        return value if isinstance(value, str) else str(self._carried(str, (value,), {}))

    def _fits(self, size: int) -> None:
        if size > self.allowance.size:
            raise LimitError(f"it makes a value of more than {self.allowance.size} characters")
        self.allowance.spend(size)


def _countable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with generators, as filters like `map` return, made lists: they are read more than once."""
    return tuple(list(value) if isinstance(value, GeneratorType) else value for value in args)
