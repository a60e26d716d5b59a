"""A GPTQ checkpoint whose output head is in 8 bits, as GPTQModel writes it with `lm_head=True`, beside layers in 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from reference.quantised_models import CASES, raw_tensors, write_quantised, write_safetensors

CASE = next(case for case in CASES if case.name == "gptq")
VOCAB, HIDDEN, GROUP = 264, 128, 32
RULE = {"lm_head": {"bits": 8, "group_size": GROUP, "sym": True, "desc_act": False, "mse": 2.4}}


def settings(**changes: Any) -> dict[str, Any]:
    return CASE.settings | {"lm_head": True, "dynamic": RULE} | changes


def head_numbers() -> tuple[Any, Any]:
    random = np.random.default_rng(7)
    codes = random.integers(0, 256, (VOCAB, HIDDEN), np.uint8)
    return codes, (random.random((VOCAB, HIDDEN // GROUP)) * 0.01 + 0.001).astype(np.float16)


def word_of(values: Any) -> Any:
    """Pack four neighbours along the first axis into an int32, the first in the low bits."""
    shifted = [values[place::4].astype(np.uint32) << np.uint32(8 * place) for place in range(4)]
    return sum(shifted[1:], shifted[0]).astype(np.uint32).view(np.int32)


def write_wide_head(folder: Path, changes: dict[str, Any] | None = None, **of_settings: Any) -> Path:
    """Write a checkpoint whose head is in 8 bits, version 1; `changes` replace its tensors."""
    codes, scales = head_numbers()
    write_quantised(CASE, folder, 0)
    tensors = raw_tensors(CASE, 0)
    tensors.pop("lm_head.weight", None)
    minus_one = np.full((HIDDEN // GROUP, VOCAB), 127, np.uint8)
    tensors |= {
        "lm_head.qweight": ("I32", word_of(codes.T)), "lm_head.scales": ("F16", np.ascontiguousarray(scales.T)),
        "lm_head.qzeros": ("I32", np.ascontiguousarray(word_of(minus_one.T).T)),
        "lm_head.g_idx": ("I32", (np.arange(HIDDEN) // GROUP).astype(np.int32)),
        **(changes or {}),
    }  # fmt: skip
    write_safetensors(folder / "model.safetensors", tensors)
    config = CASE.config | {"quantization_config": settings(**of_settings)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
