"""Files of a model's folder: absent ones, unreadable ones, and links that lead elsewhere."""

import json
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_checkpoint import write_checkpoint

from cpmrt.errors import CheckpointError
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights import hub, safetensors
from cpmrt.weights.checkpoint import Checkpoint
from cpmrt.weights.files import open_file, read_file
from cpmrt.weights.model_files import read_json, read_json_if_there
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.token_index import read_token_index

FAILING = Path("/proc/self/mem")
"""A regular file whose first byte cannot be read: what a failing disk looks like."""
OPTIONAL = {
    "generation_config.json": ModelFolder.open, "quantize_config.json": ModelFolder.open,
    "tokenizer_config.json": Tokenizer.open, "special_tokens_map.json": Tokenizer.open,
    "added_tokens.json": Tokenizer.open, "chat_template.jinja": ChatTemplate.open,
    "chat_template.json": ChatTemplate.open, "model.safetensors.index.json": Checkpoint.open,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_file_that_is_absent_is_not_one_that_cannot_be_read(tmp_path, name):
    folder, path = write_checkpoint(tmp_path), tmp_path / name
    path.unlink(missing_ok=True)
    OPTIONAL[name](folder)
    for target, words in (("nowhere", "is a link to nowhere, which does not exist"), (name, "symbolic links")):
        path.symlink_to(target)
        with pytest.raises(CheckpointError, match=words) as caught:
            OPTIONAL[name](folder)
        assert str(path) in str(caught.value)
        path.unlink()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_folder_that_may_not_be_entered_is_not_empty(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o600)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json_if_there(tmp_path / "closed" / "generation_config.json")


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        read_json_if_there(tmp_path / ("x" * 5000))


def test_a_name_that_is_no_text_can_be_shown(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(folder)
    assert r"\udcff/config.json does not exist" in str(caught.value).encode().decode()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    packed = tmp_path / "app.pyz"  # a program in one file holds the package, but no folder that can be read
    packed.write_bytes(b"PK")
    monkeypatch.setattr(hub, "BUNDLED", packed / "demo")
    with pytest.raises(CheckpointError, match=r"the folder .*/app\.pyz/demo cannot be read: Not a directory"):
        ModelFolder.open(None)


@pytest.mark.skipif(not FAILING.exists(), reason="needs /proc")
def test_a_read_that_fails_names_the_file():
    for read in (lambda: read_json(FAILING), lambda: read_file(FAILING, 100), lambda: read_token_index(FAILING, 9)):
        with pytest.raises(CheckpointError, match="/proc/self/mem cannot be read: Input/output error"):
            read()


def test_a_header_whose_read_fails_names_the_file(tmp_path, monkeypatch):
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")

    class Failing(BytesIO):
        def fileno(self):
            return os.open(tmp_path / "model.safetensors", os.O_RDONLY)

        def read(self, size=-1):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(safetensors, "open_file", lambda path: Failing())
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Input/output error"):
        Checkpoint.open(tmp_path)


def test_a_link_within_the_folder_is_followed(tmp_path):
    folder = write_checkpoint(tmp_path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / "parts").mkdir(exist_ok=True)
        (folder / name).rename(folder / "parts" / name)
        (folder / name).symlink_to(f"parts/{name}")
    (tmp_path.parent / "other-name").symlink_to(folder)
    ModelFolder.open(tmp_path.parent / "other-name")
    Tokenizer.open(folder)
    with Checkpoint.open(folder):
        pass


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    folder, outside = write_checkpoint(tmp_path / "model"), tmp_path / "outside"
    (folder / name).touch()
    (folder / name).rename(outside)
    for target in (outside, Path("..") / "outside", Path("/etc/passwd")):
        (folder / name).symlink_to(target)
        with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of its folder.*put a copy"):
            open_file(folder / name)
        (folder / name).unlink()


def test_repositories_of_the_cache_may_share_a_blob(tmp_path):
    """A repository's blob may be a link to one shared by all repositories, as newer versions of the hub's library have
    it."""
    repository, shared = tmp_path / "models--org--name", tmp_path / "blobs" / "ab"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "blobs", shared):
        folder.mkdir(parents=True)
    (shared / "ab12").write_text('{"a": 1}')
    (repository / "blobs" / "1").symlink_to("../../blobs/ab/ab12")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert read_json(snapshot / "config.json") == {"a": 1}


def test_the_cache_of_the_hub_links_to_its_blobs_and_nowhere_else(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for folder in (snapshot / "eagle2", blobs, tmp_path / "models--org--other" / "blobs"):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (tmp_path / "models--org--other" / "blobs" / "1").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    (snapshot / "eagle2" / "config.json").symlink_to("../../../blobs/1")
    assert read_json(snapshot / "config.json") == read_json(snapshot / "eagle2" / "config.json") == {}
    (snapshot / "tokenizer.json").symlink_to("../../../models--org--other/blobs/1")
    (repository / "secret").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../secret")
    for name in ("tokenizer.json", "vocab.json"):
        with pytest.raises(CheckpointError, match="leads out of its folder"):
            read_json(snapshot / name)


def test_a_list_of_tokens_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "freq_3.json").write_text(json.dumps([2, 0, 1]))
    (tmp_path / "lists" / "mine.json").symlink_to("../freq_3.json")
    assert read_token_index(tmp_path / "lists" / "mine.json", 3) == (2, 0, 1)
