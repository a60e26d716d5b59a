"""Reads the list of frequent tokens that a draft's head is cut to (FR-Spec, arXiv 2502.14856): `freq_N.pt` or JSON.

`freq_N.pt` is what torch.save makes of a list of ints or of a tensor: a zip with a pickle. A pickle can run code, so
this one is not unpickled: its few instructions that make lists, ints and tensors are followed here, and any other is
refused.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.errors import CheckpointError, listed, quoted
from cpmrt.weights.files import open_file, reading

_MAX_BYTES = 4 << 20
_FILE_NAME = re.compile(r"freq_(\d+)\.(?:pt|json)")
_STORAGES: dict[str, np.dtype[Any]] = {
    "torch LongStorage": np.dtype("<i8"),
    "torch IntStorage": np.dtype("<i4"),
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_ORDERED = "collections OrderedDict"
_MARK = object()


def read_token_index(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the token ids, most frequent first. Raises CheckpointError for no list, ids out of range or there twice."""
    with open_file(path, anywhere=True) as file, reading(path):
        raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise CheckpointError(f"{path} is too large for a list of tokens", expected=f"at most {_MAX_BYTES} bytes")
        file.seek(0)
        ids = _read_json(raw, path) if not raw.startswith(b"PK") else _read_torch(file, path)
    return checked_token_ids(ids, vocab_size, str(path))


def checked_token_ids(ids: Any, vocab_size: int, source: str) -> tuple[int, ...]:
    """Return the ids as a tuple. Raises CheckpointError if they are not a list of the model's token ids, each once."""
    if not isinstance(ids, list) or not ids:
        raise CheckpointError(source, expected="a list of token ids", actual=quoted(ids))
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(
                f"{source}: a token id",
                expected=f"an integer in [0, {vocab_size})",
                actual=quoted(token),
                fix="use the list that was made for this model's tokenizer",
            )
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{source}: token ids", expected="each of them once", actual="some of them twice")
    return tuple(ids)


def find_token_index(folder: Path, wanted: int | None) -> Path | None:
    """Find the shortest file `freq_N.*` of a draft's folder with at least `wanted` tokens (None: the longest file).

    Returns None where the folder has no such file. Raises CheckpointError where all are too short.
    """
    found = sorted((int(m[1]), path.name) for path in folder.iterdir() if (m := _FILE_NAME.fullmatch(path.name)))
    if not found:
        return None
    if wanted is None:
        return folder / found[-1][1]
    long_enough = [name for count, name in found if count >= wanted]
    if not long_enough:
        raise CheckpointError(
            f"{folder}: a list of {wanted} frequent tokens", actual=listed([quoted(name) for _, name in found])
        )
    return folder / long_enough[0]


def _read_json(raw: bytes, path: Path) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}", expected="a list of token ids as JSON, or written by torch.save") from error


def _read_torch(file: Any, path: Path) -> Any:
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise _RefusedError("no data.pkl, or several")
            folder = pickles[0].removesuffix("data.pkl")
            machine = _Machine(lambda key: _member(archive, f"{folder}data/{key}"))
            return machine.run(_member(archive, pickles[0]))
    except _RefusedError as error:
        raise CheckpointError(
            f"{path} holds {error}",
            expected="a list of ints or a tensor, nothing else",
            fix="do not open it with torch either, unless you trust where it comes from",
        ) from error
    except Exception as error:  # zipfile and pickletools raise whatever a damaged file leads them to
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}") from error


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    # Read through a stream: the sizes in the directory of a hostile file are not to be believed.
    with archive.open(name) as member:
        raw = member.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise _RefusedError("too much data")
    return raw


class _RefusedError(Exception):
    """Raised for content that a token index may not have; the message names that content."""


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype[Any]
    key: str


class _Machine:
    """An interpreter of the few pickle instructions that lists, ints and tensors need, with a stack of its own."""

    def __init__(self, storage: Callable[[str], bytes]):
        self._storage = storage
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """Return the pickled object. Raises _RefusedError for any other instruction."""
        import pickletools  # it takes long, and few starts read such a list

        for opcode, argument, _ in pickletools.genops(pickle):
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _LITERALS:
                self.stack.append(argument)
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self, argument)
            elif opcode.name not in ("PROTO", "FRAME"):
                raise _RefusedError(f"the pickle instruction {opcode.name}")
        raise _RefusedError("a pickle without an end")

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _RefusedError("something else than a list")
        self.stack[-1].extend(items)

    def since_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def tuple_of(self, count: int) -> None:
        self.stack.append(tuple([self.stack.pop() for _ in range(count)][::-1]))

    def global_name(self, name: str) -> None:
        if name not in (_REBUILD, _ORDERED, *_STORAGES):
            raise _RefusedError(f"the name {quoted(name)}")
        self.stack.append(name)

    def stack_global(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.global_name(f"{module} {name}")

    def persistent(self, _: object) -> None:
        entry = self.stack.pop()
        if not isinstance(entry, tuple) or len(entry) != 5 or entry[0] != "storage" or entry[1] not in _STORAGES:
            raise _RefusedError("a tensor that is not of int64 or int32")
        self.stack.append(_Storage(_STORAGES[entry[1]], str(entry[2])))

    def reduce(self, _: object) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if name == _ORDERED and arguments == ():
            self.stack.append(None)  # the tensor's hooks: there are none
        elif name == _REBUILD and isinstance(arguments, tuple) and len(arguments) >= 4:
            self.stack.append(self._tensor(*arguments[:4]))
        else:
            raise _RefusedError("a call")

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any) -> list[int]:
        is_row = isinstance(shape, tuple) and len(shape) == 1 and stride == (1,) and type(shape[0]) is int
        if not isinstance(storage, _Storage) or not is_row or type(offset) is not int or min(offset, shape[0]) < 0:
            raise _RefusedError("a tensor that is not a row of ints")
        values = np.frombuffer(self._storage(storage.key), storage.dtype)
        if offset + shape[0] > len(values):
            raise _RefusedError("a tensor beyond its data")
        row: list[int] = values[offset : offset + shape[0]].tolist()
        return row


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "BINPUT": lambda machine, index: machine.put(index),
    "LONG_BINPUT": lambda machine, index: machine.put(index),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    "BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "LONG_BINGET": lambda machine, index: machine.stack.append(machine.memo[index]),
    "GLOBAL": _Machine.global_name,
    "STACK_GLOBAL": _Machine.stack_global,
    "BINPERSID": _Machine.persistent,
    "REDUCE": _Machine.reduce,
}
