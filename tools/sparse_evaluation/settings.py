"""The rows of every table: dense, the official settings, CPM.cu's, and smaller budgets."""

from __future__ import annotations

from dataclasses import dataclass

from cpmrt.config import SparseConfig, SparseSetting
from cpmrt.config.sparse import with_sparse_setting


@dataclass(frozen=True)
class Setting:
    """A row's label and what LLM takes as `sparse`."""

    label: str
    sparse: SparseSetting

    @property
    def config(self) -> SparseConfig | None:
        """What it comes to for a model without a sparse_config of its own."""
        return SparseConfig.from_hf(with_sparse_setting({}, self.sparse), self.label)

    @property
    def budget(self) -> str:
        """Blocks that a token looks at, and how many of them are chosen by score."""
        config = self.config
        return "all" if config is None else f"{config.num_selected} ({config.num_scored})"


def _fixed(window: int, topk: int) -> dict[str, int]:
    return {"init_blocks": 1, "window_size": window, "topk": topk, "dense_len": -1}


def _flags(window: int, topk: int, switch: int) -> dict[str, int]:
    return {"sink_window_size": 1, "block_window_size": window, "sparse_topk_k": topk, "sparse_switch": switch}


ALWAYS_SPARSE = Setting("always sparse", _fixed(64, 2))
OFFICIAL = Setting("official", {"init_blocks": 1, "window_size": 2048, "topk": 64, "dense_len": 8192})
SETTINGS = (
    Setting("dense", "off"),
    OFFICIAL,
    Setting("CPM.cu, command line", _flags(8, 64, 0)),
    Setting("CPM.cu, Python class", _flags(32, 32, 8192)),
    Setting("a half", _fixed(1024, 32)),
    Setting("a quarter", _fixed(512, 16)),
    Setting("an eighth", _fixed(256, 8)),
)
