"""The safetensors reader: files it reads, and files it refuses before a tensor byte is used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from timing import least_cpu_seconds

from cpmrt.errors import CheckpointError
from cpmrt.weights.safetensors import MAX_HEADER_BYTES, SafetensorsFile, encoded_header


def build(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file's bytes with this header (JSON text, raw bytes or an object), whose length field may be wrong."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), data: int = 8) -> bytes:
    return build({"t": entry(dtype, shape, offsets)}, bytes(data))


GOOD = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
TWO = {"a": entry(offsets=(0, 8)), "b": entry(offsets=(8, 16))}

# name: (bytes of the file, what the message must hold)
MALFORMED = {
    "empty file": (b"", "too short"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "got 7 bytes"),
    "header length 0": (build(b""), "header length"),
    "header length beyond the file": (build("{}", length=3), "expected 1 to 2 bytes"),
    "header length 2**64 - 1": (build("{}", length=2**64 - 1), "header length"),
    "header not UTF-8": (build(b'{"\xff":1}'), "not UTF-8"),
    "header UTF-16": (build("{}".encode("utf-16")), "not UTF-8"),
    "header not JSON": (build("{t}"), "not valid JSON"),
    "header cut": (build('{"t":' + GOOD), "not valid JSON"),
    "bytes after the object": (build("{}{}"), "not valid JSON"),
    "all zero": (bytes(64), "header length"),
    "a pickle": (b"\x80\x02}q\x00(X\x06\0\0\0weightq\x01K\x01u.", "header length"),
    "header a list": (build([]), "a JSON object"),
    "header a number": (build("7"), "a JSON object"),
    "header null": (build("null"), "a JSON object"),
    "nested lists": (build("[" * 200_000), "nested too deeply"),
    "nested objects": (build('{"a":' * 200_000), "nested too deeply"),
    "integer of 5000 digits": (build('{"t":' + "9" * 5000 + "}"), "t"),
    "duplicate tensor": (build(f'{{"t":{GOOD},"t":{GOOD}}}', bytes(8)), "'t' twice"),
    "duplicate field": (build('{"t":{"dtype":"F32",' + GOOD[1:] + "}", bytes(8)), "'dtype' twice"),
    "duplicate metadata": (build('{"__metadata__":{"a":"1","a":"2"}}'), "'a' twice"),
    "entry a list": (build({"t": []}), "tensor 't': expected an object"),
    "entry null": (build({"t": None}), "tensor 't': expected an object"),
    "no dtype": (build({"t": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "dtype"),
    "no shape": (build({"t": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "shape"),
    "no offsets": (build({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)), "data_offsets"),
    "unknown dtype": (one("F31"), "got 'F31'"),
    "lower-case dtype": (one("f32"), "got 'f32'"),
    "dtype a number": (one(32), "got 32"),
    "dtype a list": (one(["F32"]), "dtype"),
    "shape a number": (one(shape=2), "a list of integers >= 0"),
    "shape a string": (one(shape="2"), "a list of integers >= 0"),
    "dim negative": (one(shape=[-2]), "got [-2]"),
    "two negative dims": (one(shape=[-1, -2]), "got [-1, -2]"),
    "dim a float": (one(shape=[2.0]), "got [2.0]"),
    "dim NaN": (build('{"t":' + GOOD.replace("[2]", "[NaN]") + "}", bytes(8)), "got [nan]"),
    "dim a bool": (one(shape=[True], offsets=[0, 4], data=4), "got [True]"),
    "dim null": (one(shape=[None]), "got [None]"),
    "product overflows 64 bits": (one(shape=[2**32, 2**32, 2]), "too large"),
    "product wraps to the right size": (one(shape=[2**63, 2, 1]), "too large"),
    "overflow hidden by a zero": (one(shape=[0, 2**62, 4], offsets=[0, 0], data=0), "too large"),
    "33 dims": (one(shape=[1] * 33, offsets=[0, 4], data=4), "at most 32 dimensions"),
    "one offset": (one(offsets=[8]), "[begin, end]"),
    "three offsets": (one(offsets=[0, 4, 8]), "[begin, end]"),
    "offsets an object": (one(offsets={}), "data_offsets"),
    "offsets reversed": (one(offsets=[8, 0]), "[begin, end]"),
    "offset negative": (one(offsets=[-8, 0]), "got [-8, 0]"),
    "offset a bool": (one("U8", [1], [False, True], 1), "got [False, True]"),
    "offset a float": (one(offsets=[0, 8.0]), "got [0, 8.0]"),
    "end beyond the file": (one(data=7), "reaches beyond the file"),
    "both offsets beyond the file": (one(offsets=[2**70, 2**70 + 8]), "reaches beyond the file"),
    "too few bytes for the shape": (one(shape=[3]), "expected 12 bytes for F32 [3], got 8 bytes"),
    "too many bytes for the shape": (one(shape=[1]), "expected 4 bytes"),
    "bytes for an empty tensor": (one(shape=[0]), "expected 0 bytes"),
    "bytes of another dtype": (one("BF16"), "expected 4 bytes for BF16 [2]"),
    "very many bytes": (one("F64", [640, 256]), "expected 1310720 bytes for F64 [640, 256], got 8 bytes"),
    "half a byte": (one("F4", [3], [0, 1], 1), "expected 1.5 bytes"),
    "same place twice": (build({"a": entry(), "b": entry()}, bytes(8)), "overlaps"),
    "overlap": (build({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
    "empty tensor inside another": (build({"a": entry(), "b": entry("U8", [0], (4, 4))}, bytes(8)), "overlaps"),
    "hole": (build({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "leaves a hole"),
    "hole at the start": (one(offsets=[4, 12], data=12), "leaves a hole"),
    "trailing bytes": (one(data=9), "belong to no tensor"),
    "bytes and no tensor": (build({}, bytes(1)), "belong to no tensor"),
    "metadata a list": (build({"__metadata__": []}), "__metadata__"),
    "metadata null": (build({"__metadata__": None}), "__metadata__"),
    "metadata value a number": (build({"__metadata__": {"a": 1}}), "'a': expected a string, got 1"),
    "metadata value an object": (build({"__metadata__": {"a": {}}}), "expected a string"),
}


@pytest.mark.parametrize("name", ["t" * length for length in range(1, 10)])
def test_a_header_that_is_written_leaves_tensors_on_borders_of_eight_bytes(name):
    header = encoded_header({name: entry()})
    assert len(header) % 8 == 0
    found = safetensors.numpy.load(header + np.array([1.5, -2], np.float32).tobytes())
    assert found.keys() == {name} and found[name].tolist() == [1.5, -2]


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = MALFORMED[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile.open(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and expected in message
    assert "\n" not in message and len(message) < 600 + len(str(path))


def test_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(path, MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match=f"1 to {MAX_HEADER_BYTES} bytes"):
        SafetensorsFile.open(path)


def test_missing_files_folders_and_fifos_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would block for ever
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, expected in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path / "loop", "cannot be read"),
        (tmp_path / ("x" * 5000), "cannot be read"),
        (tmp_path / "a\0b", "cannot be read"),
        (Path("/dev/zero"), "not a regular file"),
    ]:
        with pytest.raises(CheckpointError, match=expected):
            SafetensorsFile.open(path)


def test_names_from_a_file_cannot_garble_a_message(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build({"\x1b[2J\ud800" + "n" * 100_000: entry("F31")}, bytes(8)))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile.open(path)
    message = str(caught.value)
    assert message.isprintable() and message.encode() and len(message) < 600 + len(str(path))


OFFICIAL = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.linspace(-1, 1, 5).astype(np.float16),
    "double": np.array([[np.pi, np.inf, np.nan]]),
    "scalar": np.array(7.5, dtype=np.float32),
    "empty": np.zeros((0, 5), dtype=np.float32),
    "ids": np.array([[-1, 2**40]], dtype=np.int64),
    "small": np.array([-128, 127], dtype=np.int8),
    "bytes": np.arange(3, dtype=np.uint8),
    "flags": np.array([True, False]),
    "混合 \U0001f600": np.array([1], dtype=np.int32),
}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(OFFICIAL, path, metadata={"format": "np"})
    with SafetensorsFile.open(path) as file:
        assert set(file.entries) == set(OFFICIAL) and file.metadata == {"format": "np"}
        for name, array in OFFICIAL.items():
            assert file.entries[name].shape == file.view(name).shape == array.shape
            np.testing.assert_array_equal(file.view(name).view(array.dtype), array)
        assert file.entries["matrix"].dtype == "F32" and file.entries["ids"].dtype == "I64"


@pytest.mark.parametrize("dtype, itemsize", [("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1), ("F16", 2), ("U64", 8)])
def test_raw_words_agree_with_the_safetensors_package(dtype: str, itemsize: int, tmp_path: Path) -> None:
    words = np.random.default_rng(0).bytes(6 * itemsize)
    content = build({"t": entry(dtype, [2, 3], (0, len(words)))}, words)
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    [(name, official)] = safetensors.deserialize(content)
    with SafetensorsFile.open(path) as file:
        assert (file.entries[name].dtype, list(file.entries[name].shape)) == (official["dtype"], official["shape"])
        assert file.view(name).tobytes() == bytes(official["data"]) == words
        assert file.view(name).shape == (2, 3) and file.view(name).itemsize == itemsize


def test_packed_bits_come_as_flat_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build({"t": entry("F4", [2, 4], (0, 4))}, b"\x01\x23\x45\x67"))
    with SafetensorsFile.open(path) as file:
        assert file.entries["t"].shape == (2, 4)
        assert file.view("t").tolist() == [0x01, 0x23, 0x45, 0x67]


def test_entries_locate_tensors_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    content = build(TWO, bytes(range(16)))
    path.write_bytes(content)
    with SafetensorsFile.open(path) as file:
        b = file.entries["b"]
        assert (b.name, b.path, b.nbytes) == ("b", path, 8)
        assert content[b.offset : b.offset + b.nbytes] == bytes(range(8, 16))


def test_views_are_read_only_and_share_the_map(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build(TWO, bytes(range(16))))
    with SafetensorsFile.open(path) as file:
        view = file.view("a")
        assert np.shares_memory(view, file.view("a")) and not view.flags.writeable
        with pytest.raises(ValueError):
            view[0] = 1
        with pytest.raises(TypeError):
            file.entries["c"] = file.entries["a"]  # type: ignore[index]


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = np.array([1.5, -2.5], dtype=np.float32)
    path = tmp_path / "m.safetensors"
    for padding in range(4):
        header = json.dumps({"t": entry()}) + " " * padding
        path.write_bytes(build(header, values.tobytes()))
        with SafetensorsFile.open(path) as file:
            assert file.view("t").tolist() == values.tolist()


def test_close_leaves_living_views_intact(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build(TWO, np.arange(4, dtype=np.float32).tobytes()))
    file = SafetensorsFile.open(path)
    view = file.view("b")[1:]
    file.close()
    file.close()
    assert view.tolist() == [3.0]


def test_closed_file_gives_no_views(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(build(TWO, bytes(16)))
    with SafetensorsFile.open(path) as file, pytest.raises(CheckpointError, match="no tensor 'c'"):
        file.view("c")
    with pytest.raises(CheckpointError, match="closed"):
        file.view("a")


def test_two_gigabytes_open_in_milliseconds(tmp_path: Path) -> None:
    rows, tensors = 1 << 20, 1024
    header = {str(i): entry("BF16", [rows // 1024, 1024], (2 * rows * i, 2 * rows * (i + 1))) for i in range(tensors)}
    path = tmp_path / "m.safetensors"
    content = build(header)
    path.write_bytes(content)
    os.truncate(path, len(content) + 2 * rows * tensors)

    def look() -> None:
        with SafetensorsFile.open(path) as file:
            views = [file.view(name) for name in file.entries]
            assert sum(view.nbytes for view in views) == 2 << 30
            assert views[-1][-1, -1] == 0
            del views

    assert least_cpu_seconds(look, 0.2) < 0.2


def open_and_touch(content: bytes, path: Path) -> bool:
    """Return whether the file opens; if so, check that the safetensors package opens it too and reads the same
    bytes."""
    path.write_bytes(content)
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return False
    with file:
        official = {name: tensor for name, tensor in safetensors.deserialize(content)}
        assert official.keys() == file.entries.keys()
        for name, tensor in official.items():
            assert file.view(name).tobytes() == bytes(tensor["data"])
    return True


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.safetensors"


@given(st.binary(max_size=200))
def test_random_bytes(scratch: Path, content: bytes) -> None:
    open_and_touch(content, scratch)


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_random_headers(scratch: Path, header: bytes, data: bytes) -> None:
    open_and_touch(build(header, data), scratch)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "BF16"]),
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(max_size=5), child, max_size=4),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "F4", "C64"]) | JSON,
        "shape": st.lists(st.integers(0, 3) | st.sampled_from([2**31, 2**63]), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2).map(sorted) | JSON,
    },
    optional={"more": JSON},
)


@examples(150)
@given(st.dictionaries(st.text(max_size=3), FIELDS | JSON, max_size=3), st.binary(max_size=24))
def test_random_entries(scratch: Path, header: dict[str, object], data: bytes) -> None:
    open_and_touch(build(header, data), scratch)


@examples(150)
@given(st.data())
def test_mutated_valid_files(scratch: Path, data: st.DataObject) -> None:
    content = bytearray(build({**TWO, "__metadata__": {"format": "pt"}}, bytes(range(16))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["set", "digit", "insert", "delete"]))
        if kind == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            content[at] = ord(data.draw(st.sampled_from('0123456789-[]{},:"')))
        elif kind == "insert":
            content.insert(at, data.draw(st.integers(0, 255)))
        else:
            del content[at]
    open_and_touch(bytes(content), scratch)


@given(
    st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F32"]), st.lists(st.integers(0, 3), max_size=3)), max_size=5),
    st.randoms(use_true_random=False),
)
def test_every_valid_layout_opens(scratch: Path, tensors: list[tuple[str, list[int]]], random: Random) -> None:
    header: dict[str, object] = {}
    end = 0
    for index, (dtype, shape) in enumerate(tensors):
        nbytes = int(np.prod(shape)) * {"U8": 1, "BF16": 2, "F32": 4}[dtype]
        header[str(index)] = entry(dtype, shape, (end, end + nbytes))
        end += nbytes
    names = list(header)
    random.shuffle(names)
    content = bytes(number % 256 for number in range(end))
    assert open_and_touch(build({name: header[name] for name in names}, content), scratch)
