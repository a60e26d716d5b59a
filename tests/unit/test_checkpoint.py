"""Finding the files of a checkpoint folder, reading the sharded index, and malformed JSON files."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cpmrt.errors import CheckpointError
from cpmrt.weights.checkpoint import INDEX_NAME, Checkpoint
from cpmrt.weights.files import MAX_JSON_BYTES
from cpmrt.weights.model_files import read_json

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_shards(folder: Path, index: object | None = None) -> None:
    save_file({"a": A}, folder / FIRST)
    save_file({"b": B}, folder / SECOND)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}} if index is None else index))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", ["model.safetensors", "model_gptq.safetensors"])
def test_single_file(name: str, tmp_path: Path) -> None:
    save_file({"a": A, "b": B}, tmp_path / name)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.folder == tmp_path and set(checkpoint.entries) == {"a", "b"}
        assert checkpoint.num_bytes == A.nbytes + B.nbytes
        np.testing.assert_array_equal(checkpoint.view("a"), A)
        with pytest.raises(CheckpointError, match="no tensor 'c'"):
            checkpoint.view("c")


def test_model_safetensors_wins_over_other_files(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"b": B}, tmp_path / "adapter.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.entries) == {"a"}


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert {name: entry.path.name for name, entry in checkpoint.entries.items()} == {"a": FIRST, "b": SECOND}
        np.testing.assert_array_equal(checkpoint.view("a"), A)
        np.testing.assert_array_equal(checkpoint.view("b"), B)
        assert checkpoint.num_bytes == A.nbytes + B.nbytes


def linked_snapshot(root: Path) -> Path:
    """Write a snapshot below `root` whose weight file is a link to a blob without a suffix; return its folder."""
    snapshot, blobs = root / "snapshots" / "abc", root / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    save_file({"a": A}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    return snapshot


def test_shards_may_be_links(tmp_path: Path) -> None:
    """A weight file may be a link to a blob without a suffix, as in the hub's cache."""
    with Checkpoint.open(linked_snapshot(tmp_path / "models--org--name")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.view("a"), A)


def test_a_link_to_blobs_is_followed_in_a_hubs_cache_only(tmp_path: Path) -> None:
    """A folder of a user's own that has these names is no cache: a link may not lead out of it."""
    snapshot = linked_snapshot(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        Checkpoint.open(snapshot)


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    write_shards(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    view = checkpoint.view("a")
    checkpoint.close()
    checkpoint.close()
    np.testing.assert_array_equal(view, A)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.view("b")


@pytest.mark.parametrize(
    "index, expected",
    [
        ([], "a JSON object"),
        ({}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": {"a": 1}}, "tensor 'a'"),
        ({"weight_map": {"a": None}}, "got None"),
        ({"weight_map": {"a": "../" + FIRST}}, "a plain name"),
        ({"weight_map": {"a": "/etc/passwd"}}, "a plain name"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "a plain name"),
        ({"weight_map": {"a": "sub\\x.safetensors"}}, "a plain name"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "a plain name"),
        ({"weight_map": {"a": ".."}}, "a plain name"),
        ({"weight_map": {"a": ""}}, "a plain name"),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "a plain name"),
        ({"weight_map": {"a": FIRST, "b": "model-00003-of-00003.safetensors"}}, "does not exist"),
        ({"weight_map": {"a": FIRST, "b": FIRST}}, "expected it in model-00001-of-00002.safetensors, got it in no"),
        ({"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}, "'c'"),
        ({"weight_map": {"a": SECOND, "b": FIRST}}, f"'a': expected it in {SECOND}, got it in {FIRST}"),
    ],
)
def test_bad_index(index: object, expected: str, tmp_path: Path) -> None:
    write_shards(tmp_path, index)
    assert expected in refusal(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": A, "b": B}, tmp_path / SECOND)
    message = refusal(tmp_path)
    assert "'a' is in two files" in message and FIRST in message and SECOND in message


def test_tensor_twice_in_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    assert "'a' twice" in refusal(tmp_path)


def test_corrupt_shard_names_its_file(tmp_path: Path) -> None:
    write_shards(tmp_path)
    os.truncate(tmp_path / SECOND, (tmp_path / SECOND).stat().st_size - 1)
    message = refusal(tmp_path)
    assert SECOND in message and "'b' reaches beyond the file" in message


def test_refusal_closes_the_files(tmp_path: Path) -> None:
    write_shards(tmp_path, {"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}})
    before = len(os.listdir("/proc/self/fd"))
    refusal(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "present, expected",
    [
        ([], "got an empty folder"),
        (["config.json", "README.md"], "got 'README.md', 'config.json'"),
        (["config.json", "pytorch_model.bin"], "glob('pytorch_model*.bin')"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "glob('pytorch_model*.bin')"),
        (["model.pt"], "glob('*.pt')"),
        (["consolidated.00.pth"], "glob('*.pth')"),
        (["m'); import os; f('.bin"], "glob('*.bin')"),
        (["model-q4.gguf"], "name the .gguf file itself"),
        (["a.safetensors", "b.safetensors"], "several safetensors files"),
        (["model_gptq.safetensors", "model_gptq_marlin.safetensors"], "several safetensors files"),
    ],
)
def test_folder_without_readable_weights(present: list[str], expected: str, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).write_bytes(b"")
    assert expected in refusal(tmp_path)


def test_the_file_of_marlin_weights_among_others(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model_gptq_marlin.safetensors")
    save_file({"b": B}, tmp_path / "other.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert list(checkpoint.entries) == ["a"]


def test_command_for_pickles_is_valid_python(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    command = re.search(r'python -c "(.*)"', refusal(tmp_path))
    assert command is not None
    compile(command[1], "command", "exec")
    assert subprocess.run(["bash", "-nc", command[0]], check=False).returncode == 0


def test_absent_folder(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    assert "Not a directory" in refusal(tmp_path / "file")


def test_weights_that_are_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert "not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); mend"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON: it begins with a byte order mark; save it as UTF-8 without one"),
        (b'{"a": "\xff"}', "not UTF-8: byte 7 cannot be decoded; mend the file, or download it again"),
        (b"[1]", "expected a JSON object, got [1]"),
        (b'"text"', "expected a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b" " * (MAX_JSON_BYTES + 1), "too large"),
    ],
)
def test_bad_json_files(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert str(path) in str(caught.value) and expected in str(caught.value)


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"text": "混合", "scale": NaN, "limit": -Infinity, "list": [1, null]}', encoding="utf-8")
    value = read_json(path)
    assert value["text"] == "混合" and value["list"] == [1, None] and value["limit"] == -math.inf
    assert isinstance(value["scale"], float) and math.isnan(value["scale"])
    with pytest.raises(CheckpointError, match="does not exist"):
        read_json(tmp_path / "absent.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_shards(folder)
    return folder


NAMES = st.sampled_from([FIRST, SECOND, "x.safetensors"]) | st.text(max_size=5) | st.none()


@given(st.dictionaries(st.sampled_from(["a", "b"]) | st.text(max_size=3), NAMES, max_size=3))
def test_random_index(folder: Path, weight_map: dict[str, object]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    try:
        with Checkpoint.open(folder) as checkpoint:
            assert all(checkpoint.entries[name].path.name == file for name, file in weight_map.items())
    except CheckpointError as error:
        assert str(folder) in str(error)


@given(st.binary(max_size=50))
def test_random_json(folder: Path, content: bytes) -> None:
    path = folder / "config.json"
    path.write_bytes(content)
    try:
        assert read_json(path) == json.loads(content.decode("utf-8"))
    except CheckpointError as error:
        assert str(path) in str(error)
