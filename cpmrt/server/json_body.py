"""The body of a request: read within limits of size and time, parsed within limits of depth, its fields checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import Any, NoReturn, TypeGuard, TypeVar

from cpmrt.server.errors import ApiError, invalid, naming, shutting_down
from cpmrt.text.messages import check_unicode
from cpmrt.yielding_json import Decoders

MAX_DEPTH = 64
BODY_TIMEOUT_S = 30.0

Receive = Callable[[], Awaitable[Any]]
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def client_left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(
    receive: Receive, content_length: str | None, max_bytes: int, over: asyncio.Future[None] | None = None
) -> bytes:
    """Read the whole body. Raises ApiError 413 or 408, 503 as soon as `over` is done, ClientGoneError."""
    if content_length is not None and content_length.isdecimal() and int(content_length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    reading = asyncio.ensure_future(_read(receive, max_bytes))
    try:
        waited = (reading,) if over is None else (reading, over)
        await asyncio.wait(waited, timeout=BODY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
    finally:
        reading.cancel()
    if over is not None and over.done():
        raise shutting_down()
    message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
    raise ApiError(408, message, code="timeout", headers={"Connection": "close"})


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises ApiError 400: not UTF-8, not JSON, NaN, a number too long or beyond all floats, too deep, no object.
    """
    try:
        value = _DECODERS.decode(body.decode("utf-8"))
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _malformed(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        problem = str(error).partition("; use sys.")[0]  # which Python advises for a number of very many digits
        raise _malformed(problem[:200]) from None
    if not isinstance(value, dict):
        raise _malformed("it is not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is beyond the numbers of a float")
    return number


_DECODERS = Decoders(parse_constant=_refuse_constant, parse_float=_finite_float)


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        level = [item for item in deeper if isinstance(item, (dict, list))]
        if not level:
            return
    raise RecursionError


def _malformed(problem: str) -> ApiError:
    return ApiError(400, f"the body is not a valid JSON request: {problem}", code="invalid_json")


class Fields:
    """Reads the fields of a JSON object by type. `path` is put in front of their names in errors.

    Every method returns None for a field that is absent or null, as the OpenAI API takes them to be the same, and
    raises ApiError 400 for a value of another type.
    """

    def __init__(self, values: dict[str, Any], path: str = ""):
        self._values, self._path = values, path

    def name(self, key: str) -> str:
        """Return the name that errors give to the field."""
        return f"{self._path}.{key}" if self._path else key

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    def number(self, key: str) -> float | None:
        value = self.raw(key)
        return None if value is None else float(self._valid(key, is_number(value), "a number"))

    def integer(self, key: str, within: range | None = None) -> int | None:
        """Return a whole number; 4.0 counts, as JSON does not tell them apart."""
        value = self.raw(key)
        if value is None:
            return None
        self._valid(key, is_number(value) and value == int(value), "an integer")
        number = int(self._valid(key, abs(value) < 2**64, "an integer of at most 64 bits"))
        if within is not None and number not in within:
            raise invalid(self.name(key), f"expected {within[0]} to {within[-1]}, got {number}")
        return number

    def boolean(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false")

    def string(self, key: str) -> str | None:
        return self._typed(key, str, "a string")

    def array(self, key: str) -> list[Any] | None:
        return self._typed(key, list, "an array")

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Return an object as it is."""
        return self._typed(key, dict, "an object")

    def object(self, key: str) -> Fields | None:
        """Return an object whose fields are read in turn."""
        values = self.mapping(key)
        return None if values is None else Fields(values, self.name(key))

    def _typed(self, key: str, kind: type[T], expected: str) -> T | None:
        value: T | None = self.raw(key)
        return None if value is None else self._valid(key, isinstance(value, kind), expected)

    def _valid(self, key: str, is_valid: bool, expected: str) -> Any:
        value = self.raw(key)
        if not is_valid:
            raise invalid(self.name(key), f"expected {expected}, got {shown(value)}")
        return value


def is_integer(value: object) -> TypeGuard[int]:
    """Tell whether a JSON value is a whole number, written as one."""
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids(value: object, where: str) -> list[int]:
    """Return an array of whole numbers; 4.0 counts, as JSON does not tell them apart.

    Raises ApiError 400 that names the first element of another type.
    """
    if not isinstance(value, list):
        raise invalid(where, f"expected an array of token ids, got {shown(value)}")
    if all(map(is_integer, value)):
        return value
    for index, number in enumerate(value):
        if not (is_number(number) and number == int(number)):
            raise invalid(f"{where}[{index}]", f"expected a token id, got {shown(number)}")
    return list(map(int, value))


def is_number(value: object) -> bool:
    """Tell whether a JSON value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**1000 if isinstance(value, int) else isfinite(value)


def checked_text(text: str, where: str) -> str:
    """Return a text of a prompt. Raises ApiError 400 for one that no tokenizer takes."""
    with naming({}):
        check_unicode(text, where)
    return text


def shown(value: object) -> str:
    """Return a value for an error message as JSON has it, cut short."""
    if isinstance(value, (dict, list)):
        kind = "object" if isinstance(value, dict) else "array"
        return f"an {kind}" if value else f"an empty {kind}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return json.dumps(value)
