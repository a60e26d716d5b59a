"""The settings with which a model is loaded and run: all that are not the checkpoint's own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cpmrt.config.integers import checked_bits, checked_integer
from cpmrt.config.speculation import SpeculationConfig
from cpmrt.dtypes import DType
from cpmrt.errors import ConfigError, quoted

FP8 = "fp8"
KEEP_ANSWERS = "fast"
"""The value of `EngineConfig.prefix_cache` that also keeps the KV pages that decode steps have written."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30}


def parse_bytes(text: str | float) -> int:
    """Return the bytes of a memory budget: 8589934592, "8GiB", "8 GB" or "512MiB" (K, M and G alone are binary).

    Raises ConfigError.
    """
    written = text if isinstance(text, str) else quoted(text)
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", written)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match and not isinstance(text, bool) else 0
    if size < 1:
        raise ConfigError("memory_budget", expected="a size such as 8GiB or 512MiB", actual=quoted(text))
    return size


@dataclass(frozen=True)
class EngineConfig:
    """Run-time settings. Raises ConfigError on a value out of range.

    `max_context` in tokens (None: the model's own), `memory_budget` in bytes (None: what is free), `prefill_chunk` in
    tokens, `max_sequences` = resident sequences that decode together. `cuda_graphs` False launches kernel by kernel;
    `dependent_launch` False keeps a kernel from starting while the one before it ends (sm_90 and later).
    `steps_per_launch` equal decode steps are one launch of a graph that loops, where so many are wanted and nothing
    comes between them. Up to twice as many steps are then submitted before their results are read, and a new request
    has to wait for these. None of these settings changes a bit of the output, except that a model with LongRoPE chooses
    its list of factors by `max_context`.

    `lm_head_bits` 8 or 4 rounds the output head to that many bits while it is loaded (None: it stays as it is). With
    `lm_head_screen` a GPU keeps an 8-bit copy of a head in 16 bits. A step reads the whole copy, and of the head itself
    only the rows that may still be chosen; the tokens are the same. None leaves it to the GPU's memory
    (`opening.Blueprint.screened_plan`). `kv_dtype` "fp8" keeps keys and values in 8 bits (e4m3, a scale for each page
    and head) instead of in `dtype` ("auto").

    `prefix_cache` keeps the KV pages of prompts, as long as nothing else needs their room, for later prompts that begin
    alike. "fast" keeps those of answers too, whose bits differ a little from those that a prefill of the same text
    makes. `prefix_dir` is a folder that keeps the KV pages of chats' system parts from one start to the next
    (`cpmrt.prefixes`). `draft` is the draft model (a folder, a hub id or a folder within the model's own; None for the
    method lookup), and `speculation` says how it is used.
    """

    executor: str = "auto"
    dtype: str = "auto"
    max_context: int | None = None
    memory_budget: int | None = None
    load_format: str = "auto"
    seed: int = 0
    prefill_chunk: int = 512
    max_sequences: int = 1
    cuda_graphs: bool = True
    dependent_launch: bool = True
    steps_per_launch: int = 1
    lm_head_bits: int | None = None
    prefix_cache: bool | str = True
    draft: str | None = None
    speculation: SpeculationConfig | None = None
    kv_dtype: str = "auto"
    prefix_dir: str | None = None
    lm_head_screen: bool | None = None

    def __post_init__(self) -> None:
        _one_of("executor", self.executor, ("auto", "cuda", "reference"))
        _one_of("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        _one_of("kv_dtype", self.kv_dtype, ("auto", FP8))
        _one_of("prefix_cache", self.prefix_cache, (True, False, KEEP_ANSWERS))
        if self.dtype != "auto":
            try:
                DType.parse(self.dtype)
            except ConfigError as error:
                raise ConfigError("dtype", expected=f"auto | {error.expected}", actual=error.actual) from error
        if self.prefix_dir is not None and not (isinstance(self.prefix_dir, str) and self.prefix_dir):
            raise ConfigError("prefix_dir", expected="the name of a folder", actual=quoted(self.prefix_dir))
        if self.prefix_dir is not None and not self.prefix_cache:
            raise ConfigError("prefix_dir", expected="nothing without the prefix cache", actual=quoted(self.prefix_dir))
        object.__setattr__(self, "lm_head_bits", checked_bits("lm_head_bits", self.lm_head_bits))
        for switch in ("cuda_graphs", "dependent_launch"):
            if not isinstance(getattr(self, switch), bool):
                raise ConfigError(switch, expected="True | False", actual=quoted(getattr(self, switch)))
        if not isinstance(self.lm_head_screen, bool | None):
            actual = quoted(self.lm_head_screen)
            raise ConfigError("lm_head_screen", expected="True | False | None (automatic)", actual=actual)
        if self.lm_head_screen and self.lm_head_bits is not None:
            raise ConfigError(
                "lm_head_screen", expected="a head in 16 bits", actual=f"lm_head_bits={self.lm_head_bits}",
                fix="leave one of the two out: with lm_head_bits the whole head is as small as the copy",
            )  # fmt: skip
        for name, low, high in (
            ("max_context", 1, 2**31 - 1),
            ("memory_budget", 1, 2**63),
            ("prefill_chunk", 1, 2**20),
            ("max_sequences", 1, 64),
            ("steps_per_launch", 1, 8),
            ("seed", -(2**63), 2**64 - 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_context", "memory_budget"):
                continue
            object.__setattr__(self, name, checked_integer(name, value, low, high))
        if self.steps_per_launch > 1 and not self.cuda_graphs:
            raise ConfigError(
                "steps_per_launch", expected="1 without CUDA graphs", actual=self.steps_per_launch,
                fix="leave cuda_graphs on",
            )  # fmt: skip
        self._check_speculation()

    @property
    def drafts_adaptively(self) -> bool:
        """Whether the engine chooses among tree shapes and plain steps."""
        return self.speculation is None or self.speculation.is_adaptive

    def _check_speculation(self) -> None:
        needs_draft = self.speculation is not None and self.speculation.method != "lookup"
        if needs_draft != (self.draft is not None):
            raise ConfigError(
                "draft", expected="a draft model" if needs_draft else "nothing", actual=quoted(self.draft),
                fix="draft and speculation belong together",
            )  # fmt: skip

    def storage_dtype(self, checkpoint_dtype: DType | None) -> DType:
        """Return the type of weights, KV and activations: the user's, else the checkpoint's, else bfloat16."""
        return DType.parse(self.dtype) if self.dtype != "auto" else checkpoint_dtype or DType.BFLOAT16


def _one_of(name: str, value: object, allowed: tuple[str | bool, ...]) -> None:
    if not any(value is one or (isinstance(value, str) and value == one) for one in allowed):
        raise ConfigError(name, expected=" | ".join(map(str, allowed)), actual=quoted(value))
