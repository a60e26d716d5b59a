"""Lists of frequent tokens: files of torch.save and JSON writers, and malicious files, which are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.errors import CheckpointError
from cpmrt.weights.token_index import find_token_index, read_token_index

VOCAB = 100_000


def write_zip(path, pickled, storages=(), *, compression=zipfile.ZIP_STORED, folder="freq_8"):
    """Write a file in the layout of torch.save since torch 1.6."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(f"{folder}/data.pkl", pickled)
        archive.writestr(f"{folder}/byteorder", "little")
        for key, raw in enumerate(storages):
            archive.writestr(f"{folder}/data/{key}", raw)
        archive.writestr(f"{folder}/version", "3\n")
    return path


def pickle_tensor(count, *, storage="LongStorage", offset=0, stride=1, key="0"):
    """Return the pickle of a one-dimensional tensor, by hand and without torch, as torch/serialization.py writes it."""

    def text(value):
        raw = value.encode()
        return b"X" + len(raw).to_bytes(4, "little") + raw

    def integer(value):
        return b"J" + value.to_bytes(4, "little", signed=True)

    storage_entry = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu")
    storage_entry += integer(count) + b"tQ"
    shape, steps = integer(count) + b"\x85", integer(stride) + b"\x85"
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage_entry + integer(offset) + shape + steps + b"\x89"
        + hooks + b"tR."
    )  # fmt: skip


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3000, unique=True), st.sampled_from([2, 3, 4, 5]))
@examples(40)
def test_a_list_that_was_pickled_into_a_zip(tmp_path_factory, ids, protocol):
    path = tmp_path_factory.mktemp("index") / "freq.pt"
    write_zip(path, pickle.dumps(ids, protocol), compression=zipfile.ZIP_DEFLATED if len(ids) % 2 else 0)
    assert read_token_index(path, VOCAB) == tuple(ids)


@pytest.mark.parametrize(("storage", "dtype"), [("LongStorage", "<i8"), ("IntStorage", "<i4")])
def test_a_tensor(tmp_path, storage, dtype):
    ids = np.random.default_rng(1).permutation(VOCAB)[:500]
    path = write_zip(tmp_path / "freq.pt", pickle_tensor(500, storage=storage), [ids.astype(dtype).tobytes()])
    assert read_token_index(path, VOCAB) == tuple(ids.tolist())


def test_a_part_of_a_tensor(tmp_path):
    """A slice has the storage of the whole tensor, and the place of its first element."""
    data = [np.arange(10, 18).astype("<i8").tobytes()]
    part = write_zip(tmp_path / "part.pt", pickle_tensor(3, offset=5), data)
    assert read_token_index(part, VOCAB) == (15, 16, 17)
    beyond = write_zip(tmp_path / "beyond.pt", pickle_tensor(3, offset=6), data)
    with pytest.raises(CheckpointError, match="a tensor beyond its data"):
        read_token_index(beyond, VOCAB)


def test_what_torch_itself_writes(tmp_path):
    torch = pytest.importorskip("torch")
    ids = list(range(70_000, 0, -3))
    for name, value in (("list.pt", ids), ("long.pt", torch.tensor(ids)), ("int.pt", torch.tensor(ids).int())):
        torch.save(value, tmp_path / name)
        assert read_token_index(tmp_path / name, VOCAB) == tuple(ids)


def test_a_json_list(tmp_path):
    (tmp_path / "freq_3.json").write_text("[7, 5, 99999]")
    assert read_token_index(tmp_path / "freq_3.json", VOCAB) == (7, 5, 99999)


class Runs:
    """An object that would run a command when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(tmp_path, protocol):
    marker = tmp_path / "ran"
    path = write_zip(tmp_path / "freq.pt", pickle.dumps([1, 2, Runs(marker)], protocol))
    with pytest.raises(CheckpointError, match=r"expected a list of ints or a tensor, nothing else"):
        read_token_index(path, VOCAB)
    assert not marker.exists()


@pytest.mark.parametrize(
    "hostile",
    [
        pickle.dumps(OrderedDict(a=1), 2),
        pickle.dumps({"a": 1}, 2),
        pickle.dumps([1.5], 2),
        pickle.dumps([[1], [2]], 2),
        pickle.dumps(["1"], 2),
        pickle.dumps([True], 2),
        pickle.dumps([None], 2),
        pickle.dumps([10**40], 2),
        pickle.dumps([], 2),
        pickle.dumps(5, 2),
        b"\x80\x02]q\x00h\x00a.",  # a list that contains itself
        b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
        b"\x80\x02X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.",
        pickle_tensor(5),  # more elements than the storage has
        pickle_tensor(-1),
        pickle_tensor(2, offset=-1),
        pickle_tensor(2, stride=0),
        pickle_tensor(2, storage="FloatStorage"),
        pickle_tensor(2, key="../version"),
        b"\x80\x02a.",
        b"\x80\x02](K\x01",
        b"",
    ],
)
def test_anything_else_is_refused(tmp_path, hostile):
    path = write_zip(tmp_path / "freq.pt", hostile, [np.arange(3, dtype="<i8").tobytes()])
    with pytest.raises(CheckpointError):
        read_token_index(path, VOCAB)


@given(st.binary(max_size=200))
@examples(200)
def test_no_bytes_raise_anything_but_the_error_for_it(tmp_path_factory, raw):
    folder = tmp_path_factory.getbasetemp()
    for path, content in ((folder / "raw.pt", raw), (folder / "zip.pt", None)):
        if content is None:
            write_zip(path, raw)
        else:
            path.write_bytes(content)
        try:
            ids = read_token_index(path, VOCAB)
        except CheckpointError:
            continue
        assert ids and all(0 <= token < VOCAB for token in ids)


@given(st.integers(0, 5000), st.integers(0, 255))
@examples(100)
def test_a_damaged_file_is_an_error_or_a_list(tmp_path_factory, place, value):
    memory = io.BytesIO()
    write_zip(memory, pickle.dumps(list(range(1000, 2500)), 2))
    raw = bytearray(memory.getvalue())
    raw[place % len(raw)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(bytes(raw))
    with suppress(CheckpointError):
        assert all(0 <= token < VOCAB for token in read_token_index(path, VOCAB))


def test_a_zip_bomb_is_refused_before_it_unfolds(tmp_path):
    path = write_zip(tmp_path / "freq.pt", b"\x00" * (64 << 20), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match="too much data"):
        read_token_index(path, VOCAB)


def test_a_file_that_is_too_large(tmp_path):
    (tmp_path / "freq.json").write_text("[" + "1," * (3 << 20) + "1]")
    with pytest.raises(CheckpointError, match="too large"):
        read_token_index(tmp_path / "freq.json", VOCAB)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 2, 1], "some of them twice"), ([5, VOCAB], r"an integer in \[0, 100000\), got 100000"), ([-1], "got -1")],
)
def test_ids_must_be_tokens_of_the_model_once_each(tmp_path, ids, message):
    (tmp_path / "freq.json").write_text(json.dumps(ids))
    with pytest.raises(CheckpointError, match=message):
        read_token_index(tmp_path / "freq.json", VOCAB)


def test_which_list_of_a_folder(tmp_path):
    assert find_token_index(tmp_path, None) is None
    for name in ("freq_8192.pt", "freq_32768.pt", "freq_16384.json", "frequencies.pt", "freq_x.pt"):
        (tmp_path / name).touch()
    chosen = {wanted: find_token_index(tmp_path, wanted).name for wanted in (100, 8192, 8193, 20000, None)}
    assert chosen == {
        100: "freq_8192.pt", 8192: "freq_8192.pt", 8193: "freq_16384.json", 20000: "freq_32768.pt",
        None: "freq_32768.pt",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="40000"):
        find_token_index(tmp_path, 40000)
