"""Golden files of quantised checkpoints: digests of the dequantised weights, and what transformers makes of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reference.quantised_models import QuantisedCase, Tensors, as_float32, modules, raw_tensors

from golden import dequantise
from golden.oracle import Oracle

NUM_PROMPT = 20
NUM_NEW = 8
NUM_LOGITS = 4
MIN_MARGIN = 5e-3
MIN_DISTINCT = 3
MAX_SEEDS = 100


def golden_arrays(case: QuantisedCase) -> dict[str, Any]:
    """Entries of the file of a case: the first seed whose greedy path no rounding in fp32 can change."""
    for seed in range(MAX_SEEDS):
        raw = raw_tensors(case, seed)
        exact = {module: _dequantised(case, raw, module, torch.float32) for module, _, _ in modules(case)}
        prompt = np.random.Generator(np.random.PCG64(seed)).integers(3, case.config["vocab_size"], NUM_PROMPT).tolist()
        oracle = Oracle(case.config, _checkpoint(case, raw, exact), None)
        greedy, margin = oracle.greedy(prompt, NUM_NEW)
        if margin > MIN_MARGIN and len(set(greedy)) >= MIN_DISTINCT:
            break
    else:
        raise SystemExit(f"{case.name}: no seed below {MAX_SEEDS} keeps a margin of {MIN_MARGIN}")
    stored_type = torch.bfloat16 if case.scales == "BF16" else torch.float16
    digests = {
        module: {
            "float32": digest(exact[module].numpy()),
            "stored": digest(_dequantised(case, raw, module, stored_type).view(torch.uint16).numpy()),
        }
        for module in exact
    }
    return {
        "seed": np.int64(seed),
        "prompt_ids": np.array(prompt, np.int32),
        "greedy_ids": np.array(greedy, np.int32),
        "logits": oracle.logits(prompt + greedy)[-NUM_LOGITS:],
        "margin": np.float32(margin),
        "digests": np.array(json.dumps(digests)),
    }


def digest(values: NDArray[Any]) -> str:
    """Of the elements of a matrix, row after row."""
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def _dequantised(case: QuantisedCase, raw: Tensors, module: str, dtype: torch.dtype) -> torch.Tensor:
    """W [N, K] of a module, computed in `dtype`."""

    def words(suffix: str) -> Any:
        entry = raw.get(f"{module}.{suffix}")
        return None if entry is None else torch.from_numpy(entry[1].copy())

    suffix = "weight_scale" if case.layout == "compressed" else "scales"
    scales = torch.from_numpy(as_float32(raw[f"{module}.{suffix}"]).copy()).to(dtype)
    if case.layout == "gptq":
        made = dequantise.gptq(words("qweight"), scales, words("qzeros"), words("g_idx"), v1=case.v1)
    elif case.layout == "awq":
        made = dequantise.awq(words("qweight"), scales, words("qzeros"))
    elif case.layout == "marlin":
        made = dequantise.marlin(words("qweight"), scales)
    else:
        zeros, order = words("weight_zero_point"), words("weight_g_idx")
        made = dequantise.compressed(words("weight_packed"), scales, zeros, order)
    return made.contiguous()


def _checkpoint(case: QuantisedCase, raw: Tensors, exact: dict[str, torch.Tensor]) -> dict[str, NDArray[np.float32]]:
    """The tensors of the same checkpoint in fp32, fused ones apart."""
    tensors = {name: as_float32(stored) for name, stored in raw.items() if stored[0] == "F16" and "scale" not in name}
    for module, weight in exact.items():
        parent, _, last = module.rpartition(".")
        if last == "qkv_proj":
            kv_rows = (len(weight) - case.config["hidden_size"]) // 2
            sizes = {"q_proj": case.config["hidden_size"], "k_proj": kv_rows, "v_proj": kv_rows}
        elif last == "gate_up_proj":
            sizes = dict.fromkeys(("gate_proj", "up_proj"), len(weight) // 2)
        else:
            sizes = {last: len(weight)}
        parts = torch.split(weight, list(sizes.values()))
        prefix = f"{parent}." if parent else ""
        tensors |= {f"{prefix}{name}.weight": part.numpy() for name, part in zip(sizes, parts, strict=True)}
    return tensors
