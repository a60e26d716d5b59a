"""Answers some of whose tokens are certain: steps of any kind must give the same tokens, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from executors.cuda_models import BASE, ROWS

from cpmrt.config import Sampling
from cpmrt.executor import MAX_CERTAIN, Admit, Decode, Executor, Mask, Prefill, Release, Speculate

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
SPARSE = {"topk": 4, "init_blocks": 1, "window_size": 128, "dense_len": 256}
CHAIN = {"shapes": [(3, 1, 4)], "adaptive": False}
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int4": {"load_format": "dummy", "hf_overrides": {"quantization_config": GPTQ}},
    "fp8": {"kv_dtype": "fp8"},
    "sparse": {"sparse": SPARSE},
    "sparse fp8": {"sparse": SPARSE, "kv_dtype": "fp8"},
    "experts": {"load_format": "dummy", "hf_overrides": EXPERTS},
    "int4 experts": {"load_format": "dummy", "hf_overrides": EXPERTS | {"quantization_config": GPTQ}},
    "latent": {"load_format": "dummy", "hf_overrides": ROWS["minicpm3"]},
    "latent int4": {"load_format": "dummy", "hf_overrides": ROWS["minicpm3"] | {"quantization_config": GPTQ}},
    "lookup": {"draft": "lookup", "speculate": CHAIN},
    "bundled": {"model": None, "draft": "eagle2", "speculate": {"adaptive": False}},
    "bundled eagle3": {"model": None, "draft": "eagle3", "speculate": {"adaptive": False}},
}
"""Settings with which a model of `SIZES`, or for `model` None the bundled one, is opened."""
SIZES = BASE | ROWS["minicpm"] | {"intermediate_size": 256, "max_position_embeddings": 2048}
VOCAB, LENGTH, SAMPLED = SIZES["vocab_size"], 640, Sampling(temperature=0.9, repetition_penalty=1.1)
DRAFT = "draft"
Wanted = Sequence[int | None]
Taken = tuple[list[int], dict[str, Any], list[int]]


def only(token: int) -> bytes:
    return bytes(token // 8) + bytes([1 << token % 8])


def wanted_tokens(num_tokens: int, seed: int) -> list[int | None]:
    """Return runs of certain tokens, some longer than a step takes, and between them free tokens (None)."""
    rng, found = np.random.default_rng(seed), list[int | None]()
    while len(found) < num_tokens:
        found += rng.integers(3, VOCAB, rng.choice([1, 2, 5, 9, 40])).tolist()
        found += [None] * int(rng.integers(1, 9))
    return found[:num_tokens]


def taken(
    executor: Executor, prompt: Sequence[int], wanted: Wanted, most: Sequence[int | str], others: Sequence[int] = ()
) -> Taken:
    """Have slot 0 take an answer of these tokens, of which None is a free one.

    Return the answer, what its full pages hold, and how many certain tokens each step had. `most` has, for the steps in
    turn, how many certain tokens a step may bring, or DRAFT for one that drafts where the next tokens are free.
    `others` are slots that decode beside it.
    """
    limits, found, rows = executor.limits, list[int](), list[int]()
    for slot in (0, *others):
        own = [*prompt, *range(3, 3 + slot)]
        executor.submit(Admit(slot, SAMPLED, 7 + slot, 400, ()))
        for start in range(0, len(own), limits.prefill_chunk):
            chunk, is_last = tuple(own[start : start + limits.prefill_chunk]), start + limits.prefill_chunk >= len(own)
            mask = mask_of(wanted[0]) if is_last and not slot else None
            result = executor.submit(Prefill(slot, chunk, start, is_last, mask)).wait()
        if slot == 0:
            found += result.slots[0].token_ids
    ahead, room = limits.num_draft, limits.certain_rows - 1 - len(others)
    turn = 0
    while len(found) < len(wanted):
        choice = most[turn % len(most)]
        turn += 1
        step = Speculate((0,))
        if not (choice == DRAFT and ahead and not others and next_free(wanted, len(found)) > ahead):
            at_most = 0 if choice == DRAFT else min(int(choice), room, MAX_CERTAIN, len(wanted) - len(found) - 1)
            certain = tuple(takewhile(lambda token: token is not None, wanted[len(found) :][: max(at_most, 0)]))
            rows.append(len(certain))
            mask = mask_of(wanted[len(found) + len(certain)])
            alone = ((),) * len(others)
            step = Decode((0, *others), (mask, *(None,) * len(others)), (certain, *alone) if certain else ())
        result = executor.submit(step).wait()
        assert result.slots[0].token_ids and all(len(other.token_ids) == 1 for other in result.slots[1:])
        found += result.slots[0].token_ids
    full = (len(prompt) + len(wanted) - 1) // 64
    pages = executor.read_pages(range(full))
    for slot in (0, *others):
        executor.submit(Release(slot))
    return found, {name: array for name, array in pages.items() if not name.startswith("draft.")}, rows


def next_free(wanted: Wanted, first: int) -> int:
    """Return how many free tokens follow from place `first` on."""
    rest = list(wanted[first:])
    return next((number for number, token in enumerate(rest) if token is not None), len(rest))


def mask_of(token: int | None) -> Mask | None:
    return None if token is None else Mask(only(token), is_filled=True)


def check_same(one: Taken, other: Taken) -> None:
    """Check that tokens and pages have the same bits, but for the first page's compressed keys.

    Their windows would begin before the text.
    """
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, array in one[1].items():
        first = int(name in ("k1_pages", "k2_pages"))
        np.testing.assert_array_equal(array[:, first:], other[1][name][:, first:], err_msg=name)
