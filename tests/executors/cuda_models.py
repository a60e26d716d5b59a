"""Checkpoints of small random models, the comparison of two logs of their steps, and a check for lost memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.golden_models import golden, model
from reference.tiny_models import random_weights, unpacked
from safetensors.numpy import save_file

from cpmrt.config import ModelConfig
from cpmrt.executor import Admit, Decode, Prefill, Step, StepResult
from cpmrt.models.decoder import tensor_specs

# Products have the sizes of those in the golden files, so that few modules are compiled for both.
BASE = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 99, "max_position_embeddings": 1024,
    "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "float16",
}  # fmt: skip
ROWS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama_bias": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "head_dim": 128, "num_attention_heads": 2,
    },
    "minicpm": {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 64},
    "minicpm_experts": {
        "architectures": ["MiniCPMForCausalLM"], "scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 64,
        "num_experts": 6, "num_experts_per_tok": 2,
    },
    "minicpm_96": {
        "architectures": ["MiniCPMForCausalLM"], "tie_word_embeddings": False, "head_dim": 96, "num_attention_heads": 2,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1},
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"], "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
}  # fmt: skip

SLACK = 8 << 20  # bytes that the driver may keep for itself
EMPTY_TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})


def write_model(folder: Path, config: dict[str, Any], weights: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint in float32, with random weights unless some are given; return its folder."""
    specs = tensor_specs(ModelConfig.from_hf(config))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(EMPTY_TOKENIZER)
    tensors = unpacked(specs, weights or random_weights(specs, 7))
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def write_golden(folder: Path, name: str) -> Path:
    """Write the checkpoint of a golden file's model; return its folder."""
    return write_model(folder, json.loads(str(golden(name)["config"])), model(name)[1])


Record = tuple[Step, StepResult]


class Agreement:
    """Compares two logs of the same greedy steps, token by token, until a sequence's tokens differ.

    `compared` counts tokens, `parted` sequences whose tokens differ. `worst` is the largest difference of
    log-probabilities; where a sequence parts, also by how much the other executor preferred its own token.
    """

    def __init__(self, ours: Iterable[Record], theirs: Iterable[Record]):
        self.compared, self.parted, self.worst = 0, 0, 0.0
        self._parted: set[int] = set()
        for (step, result), (other_step, other) in zip(ours, theirs, strict=True):
            assert step == other_step
            if isinstance(step, Admit):
                self._parted.discard(step.slot)
            slots = step.slots if isinstance(step, Decode) else (step.slot,) if isinstance(step, Prefill) else ()
            for slot, mine, reference in zip(slots, result.slots, other.slots, strict=True):
                if slot not in self._parted:
                    self._compare(slot, mine, reference)

    def _compare(self, slot: int, mine: Any, reference: Any) -> None:
        assert len(mine.token_ids) == len(reference.token_ids)
        for own, wanted in zip(mine.logprobs, reference.logprobs, strict=True):
            self.compared += 1
            known = dict(wanted.top) | {wanted.token_id: wanted.logprob}
            assert own.token_id in known, "not even among the best of the other executor"
            self.worst = max(self.worst, abs(own.logprob - known[own.token_id]))
            if own.token_id != wanted.token_id:
                self.worst = max(self.worst, wanted.logprob - known[own.token_id])
                self.parted += 1
                self._parted.add(slot)
                return


def free_bytes() -> int:
    from cupy.cuda import runtime

    gc.collect()
    free: int = runtime.memGetInfo()[0]
    return free


@contextmanager
def all_comes_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that the block gives back its device memory, up to SLACK, and every page-locked buffer."""
    from cupy.cuda import runtime

    locked: set[int] = set()
    allocate, release = runtime.hostAlloc, runtime.freeHost

    def allocating(*args: Any) -> int:
        address: int = allocate(*args)
        locked.add(address)
        return address

    def releasing(address: int) -> None:
        release(address)
        locked.discard(address)

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "hostAlloc", allocating)
        patch.setattr(runtime, "freeHost", releasing)
        before = free_bytes()
        yield
        assert free_bytes() >= before - SLACK and not locked
