"""Reads the fields of one JSON object by type, so that a bad field becomes an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from cpmrt.config.integers import integer, is_number
from cpmrt.errors import ConfigError, quoted

REQUIRED: Any = object()


class Fields:
    """The fields of a JSON object from `source` (a file name for messages). null counts as absent.

    A program may have put numbers of NumPy there, as in `hf_overrides`: they come out as Python's own.
    """

    def __init__(self, data: Mapping[str, Any], source: str):
        self.data, self.source = data, source

    def fail(self, name: str, expected: str, fix: str | None = None) -> ConfigError:
        """Return the error for a field that does not hold what is `expected`."""
        actual = quoted(self.data[name]) if name in self.data else "nothing"
        return ConfigError(f"{self.source}: {name}", expected=expected, actual=actual, fix=fix)

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.fail(name, "a value")
        return None

    def first_of(self, *names: str) -> str:
        """Return the first of these names that has a value, else the last."""
        return next((name for name in names if self.data.get(name) is not None), names[-1])

    def integer(self, name: str, default: Any = REQUIRED, low: int = 1, high: int = 2**31 - 1) -> Any:
        """Return an integer in [low, high]; the default (any type) where the field is absent."""
        value = self._value(name, default)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        number = integer(value, low, high)
        if number is None:
            raise self.fail(name, f"an integer in [{low}, {high}]")
        return number

    def number(self, name: str, default: Any = REQUIRED, low: float = 1e-12, high: float = 1e12) -> Any:
        """Return a number in [low, high] as float; the default (any type) where the field is absent."""
        value = self._value(name, default)
        if value is None:
            return default
        if not _is_number_in(value, low, high):
            raise self.fail(name, f"a number in [{low:g}, {high:g}]")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false; the default where the field is absent."""
        value = self._value(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a string; the default (any type) where the field is absent."""
        value = self._value(name, default)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def numbers(self, name: str, length: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of `length` numbers in [low, high] as a tuple; the field is required."""
        values = self._value(name, REQUIRED)
        if not isinstance(values, list) or len(values) != length:
            found = f"a list of {len(values)}" if isinstance(values, list) else quoted(values)
            raise ConfigError(f"{self.source}: {name}", expected=f"a list of {length} numbers", actual=found)
        wrong = [value for value in values if not _is_number_in(value, low, high)]
        if wrong:
            expected = f"numbers in [{low:g}, {high:g}]"
            raise ConfigError(f"{self.source}: {name}", expected=expected, actual=quoted(wrong[0]))
        return tuple(float(v) for v in values)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return the ids of a field that holds one or a list of them, each below `vocab_size`; none if it is absent."""
        value = self.data.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(integer(i, 0, vocab_size - 1) is None for i in ids):
            raise self.fail(name, f"token ids in [0, {vocab_size})")
        return tuple(int(i) for i in ids)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; an empty one where the field is absent."""
        value = self._value(name, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.fail(name, "an object")
        return value

    def names(self, name: str) -> list[str]:
        """Return a list of texts, or of lists of texts, as one list; an empty one where the field is absent."""
        value = self._value(name, None)
        if value is None:
            return []
        items: list[Any] = value if isinstance(value, list) else [None]
        flat = [entry for item in items for entry in (item if isinstance(item, list) else [item])]
        if not all(isinstance(entry, str) and entry for entry in flat):
            raise self.fail(name, "a list of names")
        return flat


def _is_number_in(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number in [low, high]: NaN never is, and an integer too large for a float is compared as it
    is."""
    return is_number(value, Real) and low <= value <= high
