"""Block-sparse attention (InfLLM-v2, arXiv 2509.24663): which blocks of 64 tokens a token looks at.

A token at position i sees n = i + 1 tokens, in blocks 0 .. i // 64. It looks at all of them while n < dense_len, or
while they are at most `num_selected` = topk + window_size / 64 blocks; else at exactly `num_selected`: the first
`init_blocks`, the `local_blocks` + 1 last ones (its own among them), and those of the highest score between.

Scores come from compressed keys, means over windows of the keys (before RoPE with `use_nope`): K1 of 32 tokens, one
every 16, and K2 of 128 tokens, one every 64; only windows that end at or before i count. For a KV head,
    p[j] = sum over its query heads of exp(scale q K1[j] - log sum over j' of exp(scale q K2[j'])),
    score of block b = max of p[4b - 1 .. 4b + 3];
of blocks with equal scores, which are common as neighbouring blocks share a window, the lower one comes first. Every KV
head of every token chooses for itself.

The official code compares dense_len with the length of the whole call, so that a long prompt is sparse from its first
token on and a short one is not. Here the token's own n decides, so that a token chooses alike in a prompt of any chunk
size, in decoding, and in a draft tree. Tokens below dense_len see more than in the official code, never less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cpmrt.config.fields import Fields
from cpmrt.errors import ConfigError, UnsupportedModelError, quoted

SparseSetting = str | Mapping[str, Any]
"""The values of `LLM(sparse=...)`: "auto" (as config.json says), "off", or settings that replace config.json's."""

_SECTION = "sparse_config"
_FIXED = {"block_size": 64, "kernel_size": 32, "kernel_stride": 16}
_CPMCU_FLAGS = {
    "sink_window_size": ("init_blocks", 1),
    "block_window_size": ("window_size", _FIXED["block_size"]),
    "sparse_topk_k": ("topk", 1),
    "sparse_switch": ("dense_len", 1),
}
"""CPM.cu's names -> the names here, and the units of such a field in one of CPM.cu's. CPM.cu has one local block fewer
and one chosen block more, so the total is the same. Its `use_compress_lse` must be true: K2 serves that."""


@dataclass(frozen=True)
class SparseConfig:
    """The `sparse_config` of a config.json; defaults are those of the official modeling code.

    `window_size` is in tokens (only whole blocks count); `topk` in blocks, the first ones and the token's own among
    them; `dense_len` in tokens, -1 (or 0) for always sparse.
    """

    init_blocks: int = 1
    window_size: int = 2048
    topk: int = 64
    dense_len: int = 8192
    use_nope: bool = False

    @property
    def local_blocks(self) -> int:
        """Blocks right before a token's own block that the token always looks at."""
        return self.window_size // _FIXED["block_size"]

    @property
    def num_selected(self) -> int:
        """Blocks that a token looks at where it has to choose: the length of a list of chosen blocks."""
        return self.topk + self.local_blocks

    @property
    def num_scored(self) -> int:
        """Blocks among the `num_selected` that are chosen by score."""
        return self.topk - self.init_blocks - 1

    @property
    def dense_context(self) -> int:
        """The longest context in which no token leaves anything out, in tokens."""
        return max(self.dense_len - 1, self.num_selected * _FIXED["block_size"])

    def leaves_out(self, num_tokens: int) -> bool:
        """Whether a token that sees `num_tokens` tokens, its own among them, looks at some of their blocks only."""
        return num_tokens > self.dense_context

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> SparseConfig | None:
        """Return the settings in config.json's object; None without a `sparse_config`.

        Raises ConfigError, UnsupportedModelError.
        """
        section = Fields(config, source).mapping(_SECTION)
        if config.get(_SECTION) is None:
            return None
        read = Fields(section, f"{source}: {_SECTION}")
        known = (*(field.name for field in fields(cls)), *_FIXED)
        for name in section:
            if name not in known:
                raise ConfigError(
                    f"{read.source}: unknown field", expected=" | ".join(known), actual=quoted(name),
                    fix='sparse="off" runs the model dense',
                )  # fmt: skip
        for name, value in _FIXED.items():
            if read.integer(name, value) != value:
                raise UnsupportedModelError(f"{read.source}: {name}", expected=value, actual=section[name])
        made = cls(
            init_blocks=read.integer("init_blocks", cls.init_blocks, low=0),
            window_size=read.integer("window_size", cls.window_size, low=_FIXED["block_size"]),
            topk=read.integer("topk", cls.topk, high=2**15),
            dense_len=read.integer("dense_len", cls.dense_len, low=-1),
            use_nope=read.boolean("use_nope", cls.use_nope),
        )
        if made.num_scored < 0:
            raise read.fail("topk", f"at least init_blocks + 1 ({made.init_blocks + 1}), which are always among them")
        return made


def with_sparse_setting(config: Mapping[str, Any], setting: SparseSetting) -> dict[str, Any]:
    """Return config.json's object with the `sparse_config` that the setting asks for.

    A mapping replaces single fields of the model's own settings, or of the defaults where it has none; its names may be
    those of CPM.cu's flags. Raises ConfigError.
    """
    changed = dict(config)
    if isinstance(setting, Mapping):
        section = Fields(config, "config.json").mapping(_SECTION)
        changed[_SECTION] = {**section, **_own_names(setting)}
    elif setting == "off":
        changed.pop(_SECTION, None)
    elif setting != "auto":
        raise ConfigError("sparse", expected='"auto" | "off" | fields of sparse_config', actual=quoted(setting))
    return changed


def _own_names(setting: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for name, value in setting.items():
        if name == "use_compress_lse":
            if value is not True:
                raise ConfigError("sparse: use_compress_lse", expected="true", actual=quoted(value))
            continue
        field, unit = _CPMCU_FLAGS.get(name, (name, 1))
        if field in own:
            raise ConfigError("sparse", expected=f"{field} once", actual=list(setting))
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        own[field] = value * unit if is_integer else value
    return own
