"""Files that `cpmrt quantize` and `cpmrt convert` copy beside the weights: those of the model's folder, and no
others."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from tiny_checkpoint import write_checkpoint

from cpmrt.cli.main import main
from cpmrt.errors import CheckpointError, ConfigError
from cpmrt.quantization import outputs
from cpmrt.quantization.outputs import copy_companions, new_file, new_folder

RTN = ("--method", "rtn", "--group-size", "32")
TERNARY = ("--method", "ternary", "--group-size", "32")


@pytest.mark.parametrize("command", [("quantize", *RTN), ("quantize", *TERNARY), ("convert", "--to", "safetensors")])
def test_a_link_out_of_the_folder_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    folder, secret = write_checkpoint(tmp_path / "model"), tmp_path / "id_rsa"
    secret.write_text("PRIVATE")
    (folder / "notes.txt").symlink_to(secret)
    name, *options = command
    assert main([name, str(folder), str(tmp_path / "out"), *options]) == 1
    said = capsys.readouterr().err
    assert "notes.txt is a link that leads out of its folder" in said and "layer" not in said
    assert not (tmp_path / "out").exists()


def test_marlin_and_back_copy_no_link_out_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    folder = write_checkpoint(tmp_path / "model", **sizes)
    assert main(["quantize", str(folder), str(tmp_path / "gptq"), "--method", "rtn"]) == 0
    (tmp_path / "gptq" / "notes.txt").symlink_to(tmp_path / "model" / "config.json")
    assert main(["convert", str(tmp_path / "gptq"), str(tmp_path / "out")]) == 1
    assert "leads out of its folder" in capsys.readouterr().err


def test_a_link_to_a_blob_of_the_hub_becomes_a_file(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "abc", tmp_path / "models--org--name" / "blobs"
    for folder in (snapshot / "more.txt", blobs, tmp_path / "out"):
        folder.mkdir(parents=True)
    (blobs / "1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    copy_companions(snapshot, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_chat_templates_with_a_folder_of_their_own_come_along(tmp_path: Path) -> None:
    templates = tmp_path / "model" / "additional_chat_templates"
    for folder in (templates, tmp_path / "out", tmp_path / "linked", tmp_path / "new"):
        folder.mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("tools")
    (templates / "notes.txt").write_text("")
    copy_companions(tmp_path / "model", tmp_path / "out")
    assert [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")] == [
        "additional_chat_templates/tool_use.jinja"
    ]
    (tmp_path / "linked" / templates.name).symlink_to(templates)
    copy_companions(tmp_path / "linked", tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_companion_that_cannot_be_read_is_not_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_COMPANIONS", ("mem",))
    words = "/proc/self/mem cannot be read: Input/output error"
    with pytest.raises(CheckpointError, match=words), new_folder(tmp_path / "out") as partial:
        copy_companions(Path("/proc/self"), partial)
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_disk_without_a_number_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: the disk is gone"), new_folder(tmp_path / "out"):
        raise OSError("the disk is gone")


@pytest.mark.parametrize("new", [new_file, new_folder])
def test_a_file_that_has_come_meanwhile_stays(tmp_path: Path, new) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="out exists already; name a new"), new(out) as partial:
        if new is new_file:
            partial.write_text("ours")
        out.write_text("of somebody else")
    assert list(tmp_path.iterdir()) == [out] and out.read_text() == "of somebody else"


@pytest.mark.parametrize("new", [new_file, new_folder])
def test_a_file_that_comes_at_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new) -> None:
    out = tmp_path / "out"

    def behind_another(real):
        def run(made, target):
            out.write_text("of somebody else")
            return real(made, target)

        return run

    monkeypatch.setattr(os, "link", behind_another(os.link))
    monkeypatch.setattr(Path, "rename", behind_another(Path.rename))
    with pytest.raises(ConfigError, match="out exists already; name a new"), new(out) as partial:
        if new is new_file:
            partial.write_text("ours")
    assert list(tmp_path.iterdir()) == [out] and out.read_text() == "of somebody else"


def test_a_file_appears_on_a_disk_without_hard_links_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, link in (("first", os.link), ("second", Mock(side_effect=PermissionError(1, "Operation not permitted")))):
        monkeypatch.setattr(os, "link", link)
        with new_file(tmp_path / name) as partial:
            partial.write_text("ours")
        assert (tmp_path / name).read_text() == "ours" and (tmp_path / name).stat().st_nlink == 1
    assert len(list(tmp_path.iterdir())) == 2
