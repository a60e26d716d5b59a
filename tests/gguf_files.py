"""Writes GGUF files byte by byte, by the format's definition alone, and damaged ones as changes of a good file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
MAX = 2**64 - 1


def string(text: str | bytes, length: int | None = None) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind: int, content: Any) -> bytes:
    """Return the bytes of a value with its type in front; the content of an ARRAY is (type of its elements, list)."""
    if kind == ARRAY:
        inner, items = content
        body = b"".join(value(inner, item)[4:] for item in items)
        return struct.pack("<IIQ", kind, inner, len(items)) + body
    return struct.pack("<I", kind) + (string(content) if kind == STRING else struct.pack("<" + _CODES[kind], content))


@dataclass
class Described:
    """A tensor: its shape from the outermost dimension on, the number of its type, its bytes and their place."""

    name: str | bytes
    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None

    def encoded(self, offset: int) -> bytes:
        dims = struct.pack(f"<{len(self.shape)}Q", *self.shape[::-1])
        offset = offset if self.offset is None else self.offset
        return string(self.name) + struct.pack("<I", len(self.shape)) + dims + struct.pack("<IQ", self.kind, offset)


@dataclass
class Content:
    """The parts of a GGUF file; every field can be set to something wrong."""

    keys: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[Described] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_keys: int | None = None
    num_tensors: int | None = None
    alignment: int = 32
    end: bytes = b""

    def encoded(self) -> bytes:
        counts = [len(self.tensors), len(self.keys)]
        if self.num_tensors is not None:
            counts[0] = self.num_tensors
        if self.num_keys is not None:
            counts[1] = self.num_keys
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        head += b"".join(string(key) + content for key, content in self.keys)
        data = b""
        for tensor in self.tensors:
            data += b"\0" * (-len(data) % self.alignment)
            head += tensor.encoded(len(data))
            data += tensor.data
        return head + b"\0" * (-len(head) % self.alignment) + data + self.end

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encoded())
        return path


def good() -> Content:
    """Return a small file with a key of every type and tensors of five types."""
    random = np.random.default_rng(3)
    keys: list[tuple[str | bytes, bytes]] = [
        ("general.architecture", value(STRING, "llama")),
        ("general.alignment", value(U32, 32)),
        ("a.text", value(STRING, "größer ✓")),
        ("a.truth", value(BOOL, 1)),
        ("a.strings", value(ARRAY, (STRING, ["a", "", "ü"]))),
        ("a.numbers", value(ARRAY, (I32, [1, -2, 3]))),
        ("a.truths", value(ARRAY, (BOOL, [1, 0]))),
        ("a.empty", value(ARRAY, (F32, []))),
    ]
    numbers = {U8: 200, I8: -3, U16: 60000, I16: -300, U32: 4_000_000_000, I32: -70_000, F32: 0.5, U64: 2**63, I64: -9}
    keys += [(f"a.number{kind}", value(kind, content)) for kind, content in {**numbers, F64: 1e300}.items()]
    tensors = [
        Described("plain.weight", (3,), 0, np.arange(3, dtype="<f4").tobytes()),
        Described("half.weight", (2, 5), 1, np.arange(10, dtype="<f2").tobytes()),
        Described("words.weight", (2, 2, 2), 30, np.arange(8, dtype="<u2").tobytes()),
        Described("blocks.weight", (2, 64), 8, random.bytes(2 * 2 * 34)),
        Described("super.weight", (1, 512), 12, random.bytes(2 * 144)),
    ]
    return Content(keys, tensors)


@dataclass(frozen=True)
class Damage:
    """One change of the good file, and words that the error must have."""

    name: str
    change: Callable[[Content], Content | bytes | None]
    words: str


def damaged(damage: Damage) -> bytes:
    """Return the bytes of the good file with one change."""
    content = good()
    made = damage.change(content)
    return made if isinstance(made, bytes) else (made or content).encoded()


def _set(**fields: Any) -> Callable[[Content], None]:
    return lambda content: [setattr(content, name, value) for name, value in fields.items()] and None


def _key(key: str | bytes, content: bytes) -> Callable[[Content], None]:
    """Replace a key of the good file, or add one."""

    def change(file: Content) -> None:
        file.keys = [pair for pair in file.keys if pair[0] != key] + [(key, content)]

    return change


def _tensor(index: int, **fields: Any) -> Callable[[Content], None]:
    return lambda content: [setattr(content.tensors[index], name, value) for name, value in fields.items()] and None


def _cut(place: int) -> Callable[[Content], bytes]:
    return lambda content: content.encoded()[:place]


def damages() -> Iterator[Damage]:
    """Yield every damage that a reader must refuse, always in the same order."""
    yield from _heads()
    yield from _values()
    yield from _descriptions()
    yield from _places()


def _heads() -> Iterator[Damage]:
    for place in (0, 1, 4, 7, 23, 24, 40, 100, 300, 1000):
        words = "too short" if place < 24 else "number of" if place < 100 else "the file may be cut"
        yield Damage(f"cut after {place} bytes", _cut(place), words)
    yield Damage("another magic", _set(magic=b"GGML"), "no GGUF file")
    yield Damage("safetensors", _set(magic=b"\x40\0\0\0"), "no GGUF file")
    yield Damage("a pointer of git", lambda _: b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS")
    yield Damage("version 1", _set(version=1), "GGUF version")
    yield Damage("version 4", _set(version=4), "GGUF version")
    yield Damage("big-endian", _set(version=3 << 24), "big-endian")
    for count in (1 << 20, 2**32, 2**63, MAX):
        yield Damage(f"{count} keys", _set(num_keys=count), "number of keys")
        yield Damage(f"{count} tensors", _set(num_tensors=count), "number of tensors")
    yield Damage("a key more than there are", _set(num_keys=19), "the name of tensor 0")
    yield Damage("a tensor more than there are", _set(num_tensors=6), "tensor 5")
    yield Damage("a key less than there are", _set(num_keys=17), "tensor")


def _values() -> Iterator[Damage]:
    yield Damage("a key twice", lambda file: file.keys.append(file.keys[0]), "twice")
    yield Damage("an empty key", _key("", value(U8, 1)), "the length of key")
    yield Damage("a long key", _key("k" * 70_000, value(U8, 1)), "the length of key")
    yield Damage("a key that is not UTF-8", _key(b"\xff\xfe", value(U8, 1)), "not UTF-8")
    yield Damage("a string that is not UTF-8", _key("x", struct.pack("<I", STRING) + string(b"ab\xc3")), "not UTF-8")
    for length in (10_000, 2**31, 2**63, MAX):
        raw = struct.pack("<I", STRING) + string("ab", length)
        yield Damage(f"a string of {length} bytes", _key("x", raw), "'x'")
    for inner, label in ((U8, "numbers"), (F64, "wide numbers"), (STRING, "strings")):
        for length in (1 << 20, 2**61, MAX):
            raw = struct.pack("<IIQ", ARRAY, inner, length)
            yield Damage(f"{length} {label}", _key("x", raw), "'x'")
    for kind in (13, 255, 2**32 - 1):
        yield Damage(f"a value of type {kind}", _key("x", struct.pack("<IQ", kind, 0)), "the type of key 'x'")
        yield Damage(f"elements of type {kind}", _key("x", struct.pack("<IIQ", ARRAY, kind, 1) + b"\0" * 64), "'x'")
    nested = struct.pack("<IIQ", ARRAY, ARRAY, 1) + struct.pack("<IQ", U8, 1) + b"\0"
    yield Damage("lists in a list", _key("x", nested), "a list of lists")
    yield Damage("a truth value of 2", _key("x", value(U8, 2).replace(b"\0", b"\7", 1)), "truth value")
    yield Damage("truth values of 3", _key("x", struct.pack("<IIQ", ARRAY, BOOL, 2) + b"\0\3"), "truth value")
    for number in (0, 1, 7, 24, 33, 2**21, 2**32 - 1):
        yield Damage(f"an alignment of {number}", _key("general.alignment", value(U32, number)), "general.alignment")
    for kind, content in ((STRING, "32"), (F32, 32.0), (BOOL, 1), (I32, -32), (ARRAY, (U32, [32]))):
        yield Damage(f"an alignment of type {kind}", _key("general.alignment", value(kind, content)), "alignment")


def _descriptions() -> Iterator[Damage]:
    yield Damage("a tensor twice", _tensor(1, name="plain.weight"), "'plain.weight' is there twice")
    yield Damage("a tensor without a name", _tensor(0, name=""), "the name of tensor 0")
    yield Damage("a long name", _tensor(0, name="n" * 65), "the name of tensor 0")
    yield Damage("a name that is not UTF-8", _tensor(0, name=b"\x80"), "not UTF-8")
    yield Damage("no dimensions", _tensor(0, shape=()), "number of dimensions")
    yield Damage("five dimensions", _tensor(0, shape=(1, 1, 1, 1, 3)), "number of dimensions")
    yield Damage("a dimension of 0", _tensor(0, shape=(0,)), "its shape")
    for size in (2**31, 2**62, MAX):
        yield Damage(f"a dimension of {size}", _tensor(0, shape=(size,)), "its shape")
    yield Damage("dimensions whose product is 0 in 64 bits", _tensor(0, shape=(2**32, 2**32)), "its shape")
    yield Damage("half a block", _tensor(3, shape=(4, 48)), "a multiple of 32 columns")
    yield Damage("half a super-block", _tensor(4, shape=(4, 128)), "a multiple of 256 columns")
    for kind in (4, 5, 16, 24, 36, 255, 2**32 - 1):
        yield Damage(f"a tensor of type {kind}", _tensor(0, kind=kind), "type that is not supported")


def _places() -> Iterator[Damage]:
    for offset in (32, 1 << 20, 2**63, MAX):
        yield Damage(f"the first tensor at {offset}", _tensor(0, offset=offset), "tensor")
    yield Damage("two tensors at one place", _tensor(1, offset=0), "overlaps")
    yield Damage("a tensor that begins in another", _tensor(4, offset=128), "overlaps")
    yield Damage("a tensor off its place", _tensor(1, offset=33), "is not where the one before it ends")
    yield Damage("a hole", _tensor(4, offset=480), "is not where the one before it ends")
    yield Damage("a tensor larger than the file", _tensor(4, shape=(9, 512)), "reaches beyond the file")
    yield Damage("the last byte missing", lambda file: file.encoded()[:-1], "reaches beyond the file")
    yield Damage("bytes behind the tensors", _set(end=b"\0" * 64), "belong to no tensor")


def split(folder: Path, stem: str = "model") -> list[Path]:
    """Write the good file's tensors in three parts, its keys in the first of them."""
    whole, paths = good(), []
    for number, tensors in enumerate((whole.tensors[:2], whole.tensors[2:3], whole.tensors[3:])):
        keys = whole.keys if number == 0 else []
        own: list[tuple[str | bytes, bytes]] = [
            ("split.no", value(U16, number)), ("split.count", value(U16, 3)), ("split.tensors.count", value(I32, 5))
        ]  # fmt: skip
        path = folder / f"{stem}-{number + 1:05}-of-00003.gguf"
        paths.append(Content([*keys, *own], tensors).write(path))
    return paths
