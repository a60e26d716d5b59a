"""tools/planted_choices.py: choices of blocks with a stated union."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from planted_choices import TOGETHER, planted_choices
from sparse_evaluation.neighbours import chance, unions

from cpmrt.config import SparseConfig


@pytest.mark.parametrize(("start", "union"), [(126_976, None), (126_976, 659), (126_976, 250), (60_000, 120)])
def test_neighbours_choose_as_many_blocks_as_was_asked(start: int, union: int | None) -> None:
    config, rows = SparseConfig(), 240
    blocks = planted_choices(start, rows, 2, config, union, np.random.default_rng(0))
    owns = (start + np.arange(rows)) // 64
    assert blocks.shape == (rows, 2, config.num_selected) and (np.diff(blocks, axis=2) > 0).all()
    assert (blocks[:, :, 0] == 0).all()
    assert (blocks[:, :, -config.local_blocks - 1 :] == owns[:, None, None] + np.arange(-config.local_blocks, 1)).all()
    expected = chance(start + rows, TOGETHER, config) if union is None else union
    assert unions(blocks, TOGETHER).mean() == pytest.approx(expected, rel=0.03)


def test_what_cannot_be_is_as_near_as_can_be() -> None:
    """An unreachable union is met as nearly as possible: too small, and all rows choose alike; too large, and none are
    kept."""
    config = SparseConfig()
    alike = planted_choices(126_976, 48, 1, config, 50, np.random.default_rng(0))
    assert (alike[:48] == alike[0]).all()
    apart = planted_choices(126_976, 48, 1, config, 10_000, np.random.default_rng(0))
    assert all(len(np.intersect1d(*pair)) == 34 for pair in zip(apart[:-1, 0], apart[1:, 0], strict=True))
