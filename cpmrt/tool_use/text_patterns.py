"""Writes regular expressions of the strings that a JSON schema allows, as terminals of llguidance's Lark.

The formats are those that JSON Schema names; a format that is not here allows any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_DAYS = "([0-9]+Y)?([0-9]+M)?[0-9]+D|([0-9]+Y)?[0-9]+M|[0-9]+Y"
_HOURS = "T(([0-9]+H)?([0-9]+M)?[0-9]+S|([0-9]+H)?[0-9]+M|[0-9]+H)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX, _QUAD = "[0-9A-Fa-f]", "[0-9A-Fa-f]{1,4}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(({_DAYS})({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "|".join([
        rf"({_QUAD}:){{7}}{_QUAD}", rf"({_QUAD}:){{1,7}}:", "::", rf":(:{_QUAD}){{1,7}}",
        *(rf"({_QUAD}:){{1,{place}}}(:{_QUAD}){{1,{7 - place}}}" for place in range(1, 7)),
    ]),
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}  # fmt: skip
_ANY = r"(.|\n)*"
_CDATA_END = rf"{_ANY}\]\]>{_ANY}"
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""One part of a regular expression: an escape sequence, a character class (its end may be missing) or a character."""


def is_constrained(schema: Mapping[str, Any]) -> bool:
    """Whether a schema of type string restricts the string: its length, by a pattern or by a known format."""
    return bool({"minLength", "maxLength", "pattern"} & schema.keys()) or _format_of(schema) is not None


def expression_of(schema: Mapping[str, Any], longest: int) -> str:
    """Return the Lark expression of the strings that a schema allows and that CDATA can hold.

    If only the length is restricted the string has no closing brackets, and without `maxLength` at most `longest`
    characters (or `minLength`, if that is more).
    """
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    parts = list[str]()
    if schema.get("pattern") is not None:
        parts.append("|".join(map(_matching_whole, _alternatives(schema["pattern"]))))
    if (known := _format_of(schema)) is not None:
        parts.append(known)
    if not parts:  # excluding "]" takes llguidance much less time than excluding "]]>"
        return _terminal(rf"[^\]]{{{least},{max(least, longest) if most is None else most}}}")
    if least or most is not None:
        parts.append(rf"(.|\n){{{least},{'' if most is None else most}}}")
    return " & ".join([*map(_terminal, parts), f"~{_terminal(_CDATA_END)}"])


def _format_of(schema: Mapping[str, Any]) -> str | None:
    """Return the expression of the format that a schema names, None if it names no known one."""
    name = schema.get("format")
    return _FORMATS.get(name) if isinstance(name, str) else None


def _matching_whole(pattern: str) -> str:
    """Return an expression that matches a whole text if a pattern without alternatives is found anywhere in it."""
    is_end = re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = pattern.removeprefix("^")[: -1 if is_end else None]
    return f"{'' if pattern.startswith('^') else _ANY}{inner}{'' if is_end else _ANY}"


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a pattern: the parts between the | that are in no group."""
    depth, alternative = 0, ""
    for part in _PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            yield alternative
            alternative = ""
        else:
            alternative += part
    yield alternative


def _terminal(pattern: str) -> str:
    """Return an expression as a Lark terminal, between slashes and on one line."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern) + "/"
