"""`tools/eval_quantized.py`: the folder that it works in."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from eval_quantized import empty

from cpmrt.errors import ConfigError


def test_a_folder_of_the_user_is_not_emptied(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="--work .*: expected a folder that is empty, absent or of an earlier run"):
        empty(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_of_an_earlier_run_is_emptied(tmp_path):
    work = tmp_path / "work"
    empty(work)
    (work / "calibration").mkdir(parents=True)
    (work / "q4_k.gguf").touch()
    empty(work)
    assert not work.exists()
