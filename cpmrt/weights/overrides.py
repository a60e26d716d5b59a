"""Changes a config.json by the keys that a user names, and tells of keys that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cpmrt.caller_warnings import warn_caller
from cpmrt.errors import ConfigError, quoted


def merged(config: dict[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return config.json's object with the keys of `overrides` replaced, objects key by key. Raises ConfigError."""
    if overrides is None:
        return config
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError("hf_overrides", expected="a dict of config.json keys", actual=quoted(overrides))
    changed = dict(config)
    for key, value in overrides.items():
        both_objects = isinstance(value, Mapping) and isinstance(changed.get(key), Mapping)
        changed[key] = {**changed[key], **value} if both_objects else value
    return changed


class ReadKeys(Mapping[str, Any]):
    """An object of JSON that remembers which keys it was asked for, also those that it does not have."""

    def __init__(self, data: Mapping[str, Any]):
        self._data, self._asked = data, set[str]()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def warn_of_unread(self, overrides: Mapping[str, Any] | None) -> None:
        """Warn of the first key of `overrides` that nobody has asked for: it is misspelt, or of another model."""
        unread = next((key for key in overrides or () if key not in self._asked), None)
        if unread is not None:
            from difflib import get_close_matches  # it takes long, and only a mistake needs it

            near = get_close_matches(unread, sorted(self._asked), 1, 0.7)
            meant = f"; did you mean {near[0]}?" if near else ""
            why = f"changes nothing: no such key of config.json is read for this model{meant}"
            warn_caller(f"hf_overrides: {quoted(unread)} {why}")
