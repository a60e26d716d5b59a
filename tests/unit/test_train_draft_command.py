"""`cpmrt train-draft` where there is no torch: its options are shown, and what to install is said."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import cpmrt
from cpmrt.cli.main import main
from cpmrt.cli.train_draft import tools_folder
from cpmrt.errors import ConfigError

LINE = ["train-draft", "--model", "demo", "--method", "eagle2", "--out", "out"]


def test_its_options_need_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-draft", "--help"]) == 0
    assert "--draft-vocab" in capsys.readouterr().out
    assert main([*LINE, "--methd", "x"]) == 2
    assert "(did you mean --method?)" in capsys.readouterr().err


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    assert main(LINE) == 1
    error = capsys.readouterr().err
    assert "cpmrt train-draft needs torch, which is not installed; " in error and "-m pip install torch" in error


def test_the_program_is_found_in_a_wheel_and_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tools_folder() / "draft_training" / "training.py").is_file()
    package = tmp_path / "cpmrt"
    package.mkdir()
    monkeypatch.setattr(cpmrt, "__file__", str(package / "__init__.py"))
    with pytest.raises(ConfigError, match="lacks the program .*pip install --force-reinstall"):
        tools_folder()
    for folder in (tmp_path / "tools", package / "tools"):  # where both exist, the second is used
        folder.mkdir()
        (folder / "train_draft.py").touch()
        assert tools_folder() == folder
