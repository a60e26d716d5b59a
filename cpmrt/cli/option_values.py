"""Parsers for the values of options, to be used as `type` in argparse. They raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

from cpmrt.config import SparseSetting
from cpmrt.config.engine import KEEP_ANSWERS, parse_bytes
from cpmrt.errors import ConfigError, reason_of

_MAX_FILE_CHARS = 10_000_000


def memory_size(text: str) -> int:
    """Parse a size in bytes, such as 8GiB."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"expected {error.expected}, got {error.actual}") from error


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error}): {text[:100]!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text[:100]!r}")
    return value


def integer(low: int, high: int, what: str = "a positive integer") -> Callable[[str], int]:
    """Return a parser for integers from `low` to `high`; its errors say that it expected `what`."""

    def parsed(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return int(text)

    return parsed


def token_count(text: str) -> int:
    """Parse a number of tokens, such as 4096, 128K (K = 1,024) or 1M."""
    number = re.fullmatch(r"([0-9]{1,10})([KkMm]?)", text)
    if not number:
        raise argparse.ArgumentTypeError(f"expected a number of tokens such as 4096 or 128K, got {text[:100]!r}")
    return int(number[1]) * {"": 1, "k": 2**10, "m": 2**20}[number[2].lower()]


def sparse_setting(text: str) -> SparseSetting:
    """Parse the setting of sparse attention: auto, off, or a JSON object of its fields."""
    if text in ("auto", "off"):
        return text
    if not text.lstrip().startswith("{"):
        raise argparse.ArgumentTypeError(f"expected auto, off or a JSON object, got {text[:100]!r}")
    return json_object(text)


def token_bias(text: str) -> tuple[int, float]:
    """Parse a token id and the bias that is added to its logit, such as 5:-1.5."""
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TOKEN_ID:NUMBER, got {text[:100]!r}") from None


def token_limit(text: str) -> int | None:
    """Parse a number of tokens, or "none"."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of tokens, or none, got {text[:100]!r}") from None


def prefix_cache(text: str) -> bool | str:
    """Parse which keys and values are kept: of earlier prompts (on), of their answers too (fast), or none (off)."""
    values: dict[str, bool | str] = {"on": True, "off": False, KEEP_ANSWERS: KEEP_ANSWERS}
    if text not in values:
        raise argparse.ArgumentTypeError(f"expected on, fast or off, got {text[:100]!r}")
    return values[text]


def text_of_file(name: str) -> str:
    """Return the text of the file that an option names, without the mark that some editors begin UTF-8 with."""
    try:
        with open(name, encoding="utf-8-sig") as file:
            text = file.read(_MAX_FILE_CHARS + 1)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name[:200]!r} cannot be read: {reason_of(error)}") from None
    if len(text) > _MAX_FILE_CHARS:
        raise argparse.ArgumentTypeError(f"{name[:200]!r} is too large: expected at most {_MAX_FILE_CHARS} characters")
    return text


def draft_vocab(text: str) -> int | str:
    """Parse the number of tokens that a draft's head is cut to, or the name of a file that lists them."""
    return int(text) if text.isascii() and text.isdigit() else text
