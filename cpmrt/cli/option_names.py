"""Puts the names of options into errors and warnings, which name the settings of the Python API that options fill."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cpmrt.caller_warnings import CpmrtWarning
from cpmrt.cli.arguments import setting_options
from cpmrt.cli.output import plain_error_line, printable
from cpmrt.errors import CpmrtError

_SPECULATE = "speculate: "
_OPTIONS = setting_options()
_WORDS = [name for name in _OPTIONS if name.isalpha()]
"""Settings such as draft, whose names are English words too."""
_NAMES = _OPTIONS.keys() - set(_WORDS)
_MENTIONED = _OPTIONS | {name.removeprefix(_SPECULATE): _OPTIONS[name] for name in _NAMES if name.count("_")}


def _any_of(names: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, names))})"


# An error begins with the setting that is wrong; that of a draft may stand behind the name of a file.
_SUBJECT = re.compile(rf"^{_any_of(_WORDS)}(?=:|$)|(?:^|(?<=: )){_any_of(_NAMES)}\b(?!/)")
_MENTION = re.compile(rf"(?<![\w./'\"-])(?:{_any_of(_WORDS)}(?==)|{_any_of(_MENTIONED.keys() - set(_WORDS))}\b(?!/))")


def error_line(error: CpmrtError) -> str:
    """Return the line that tells of an error; what the user gave is shown as it is."""
    expected = None if error.expected is None else _naming(str(error.expected))
    actual = None if error.actual is None else _beginning(str(error.actual))
    told = CpmrtError(_beginning(error.what), expected=expected, actual=actual, fix=error.fix and _naming(error.fix))
    return plain_error_line(told)


def warning_line(message: Warning | str) -> str:
    """Return the line that tells of a Python warning; that of another library is shown as it is."""
    text = str(message)
    return f"cpmrt: warning: {printable(_naming(text) if isinstance(message, CpmrtWarning) else text)}"


def _beginning(text: str) -> str:
    return _SUBJECT.sub(lambda match: _OPTIONS[match[0]], text)


def _naming(text: str) -> str:
    return _MENTION.sub(lambda match: _MENTIONED[match[0]], text)
