"""Typed reading of a JSON object. A field that is null counts as absent, as in the OpenAI API."""

from __future__ import annotations

from math import isfinite
from typing import Any

from cpmrt.server.errors import invalid


class Fields:
    """The fields of one object; `path` is put in front of their names in errors."""

    def __init__(self, values: dict[str, Any], path: str = ""):
        self._values, self._path = values, path

    def name(self, key: str) -> str:
        """How errors name the field."""
        return f"{self._path}.{key}" if self._path else key

    def raw(self, key: str) -> Any:
        """As it is; None if it is absent."""
        return self._values.get(key)

    def number(self, key: str) -> float | None:
        """A finite number."""
        value = self.raw(key)
        if value is None:
            return None
        if not is_number(value):
            raise invalid(self.name(key), f"expected a number, got {shown(value)}")
        return float(value)

    def integer(self, key: str) -> int | None:
        """A whole number; 4.0 counts, as JSON does not tell them apart."""
        value = self.raw(key)
        if value is None:
            return None
        if not is_number(value) or value != int(value) or abs(value) >= 2**64:
            raise invalid(self.name(key), f"expected an integer, got {shown(value)}")
        return int(value)

    def boolean(self, key: str) -> bool | None:
        """true or false."""
        value = self.raw(key)
        if value is not None and not isinstance(value, bool):
            raise invalid(self.name(key), f"expected true or false, got {shown(value)}")
        return value

    def string(self, key: str) -> str | None:
        """A string."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise invalid(self.name(key), f"expected a string, got {shown(value)}")
        return value

    def array(self, key: str) -> list[Any] | None:
        """An array of anything."""
        value = self.raw(key)
        if value is not None and not isinstance(value, list):
            raise invalid(self.name(key), f"expected an array, got {shown(value)}")
        return value

    def object(self, key: str) -> Fields | None:
        """An object, to be read in turn."""
        values = self.mapping(key)
        return None if values is None else Fields(values, self.name(key))

    def mapping(self, key: str) -> dict[str, Any] | None:
        """An object, as it is."""
        value = self.raw(key)
        if value is not None and not isinstance(value, dict):
            raise invalid(self.name(key), f"expected an object, got {shown(value)}")
        return value


def is_number(value: object) -> bool:
    """Whether a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**1000 if isinstance(value, int) else isfinite(value)


def shown(value: object) -> str:
    """A value in an error message, cut short."""
    text = repr(value) if not isinstance(value, (dict, list, int)) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."
