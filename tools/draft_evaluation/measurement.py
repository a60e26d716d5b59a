"""What a draft gives: the same prompts continued without it and with it, and what its steps gave."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from cpmrt import LLM, SamplingParams
from cpmrt.config import TreeShape
from cpmrt.engine.stats import AcceptCounts
from cpmrt.errors import CpmrtError
from cpmrt.memory.packed_regions import canonical_regions
from draft_evaluation.frequent import FrequentTokens
from draft_evaluation.prompts import Prompts

Cell = tuple[str, float]
"""The name of a text, and the temperature."""
TokenIds = tuple[int, ...]


class ChangedTokensError(CpmrtError):
    """A draft changed what the model says, which no draft may do."""


@dataclass(frozen=True)
class Variant:
    """A draft and how it is put to use. `index`: the tokens that its head is cut to; None: as the draft has it."""

    draft: str
    shape: TreeShape
    index: FrequentTokens | None = None
    head_bits: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Of LLM."""
        wishes: dict[str, Any] = {"shapes": [self.shape], "adaptive": False}
        if self.index is not None:
            wishes["draft_vocab"] = str(self.index.path)
        if self.head_bits is not None:
            wishes["head_bits"] = self.head_bits
        return {"draft": self.draft, "speculate": wishes}

    def __str__(self) -> str:
        size = [] if self.index is None else [f"head of {len(self.index.token_ids)} tokens"]
        bits = [] if self.head_bits is None else [f"head in {self.head_bits} bits"]
        return ", ".join([f"{self.draft} ({shape_label(self.shape)})", *size, *bits])


@dataclass(frozen=True)
class Outcome:
    """Of one variant: the counts of each cell; of its head the rows, bits and bytes that a pass reads (0: it has none).

    `covered`: of the tokens that the model says without a draft, the share in that head; None: not known.
    """

    variant: Variant
    counts: Mapping[Cell, AcceptCounts]
    head_rows: int
    head_bits: int
    head_bytes: int
    covered: float | None


def shape_label(shape: TreeShape) -> str:
    """PASSES, TOPK, SIZE as the command line takes them, or a chain."""
    if shape == TreeShape.chain(shape.num_passes):
        return f"chain of {shape.num_passes}"
    return f"{shape.num_passes}, {shape.top_k}, {shape.tree_size}"


def plain_tokens(
    llm: LLM, texts: Mapping[str, Prompts], temperatures: Sequence[float], num_tokens: int
) -> dict[Cell, list[TokenIds]]:
    """What the model itself says to each prompt, by cell."""
    return {
        (name, temperature): [tokens for tokens, _ in _continued(llm, prompts, temperature, num_tokens)]
        for name, prompts in texts.items()
        for temperature in temperatures
    }


def measure(
    llm: LLM, variant: Variant, texts: Mapping[str, Prompts], plain: Mapping[Cell, list[TokenIds]], num_tokens: int
) -> Outcome:
    """Continue the same prompts with a draft. Raises ChangedTokensError where a token differs from `plain`."""
    counts = {}
    for (name, temperature), expected in plain.items():
        total = AcceptCounts(llm.engine.limits)
        continued = _continued(llm, texts[name], temperature, num_tokens)
        for number, (wanted, (tokens, accepts)) in enumerate(zip(expected, continued, strict=True)):
            where = f"{variant}: prompt {number} of {name} at temperature {temperature:g}"
            _check(where, tokens, wanted)
            if accepts is not None:
                total.merge(accepts)
        counts[name, temperature] = total
    rows, bits, num_bytes = _head(llm)
    known = range(llm.config.vocab_size if rows == llm.config.vocab_size else 0)
    share = _share(plain, known if variant.index is None else set(variant.index.token_ids))
    return Outcome(variant, counts, rows, bits, num_bytes, share)


def _continued(
    llm: LLM, prompts: Prompts, temperature: float, num_tokens: int
) -> Iterator[tuple[TokenIds, AcceptCounts | None]]:
    """Tokens and counts of each prompt. The counts are those of `completion.stats`, which hold no sums to add up."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=num_tokens, temperature=temperature, seed=number)
        sequence = llm.engine.add(llm.request(prompt, params))
        yield tuple(token for result in llm.engine.stream(sequence) for token in result.token_ids), sequence.accepts


def _check(where: str, tokens: TokenIds, expected: TokenIds) -> None:
    if tokens == expected:
        return
    pairs = enumerate(zip(tokens, expected, strict=False))
    first = next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(tokens), len(expected)))
    raise ChangedTokensError(
        f"{where}: the draft changed token {first}",
        expected=list(expected[first : first + 4]),
        actual=list(tokens[first : first + 4]),
    )


def _share(plain: Mapping[Cell, list[TokenIds]], known: Collection[int]) -> float | None:
    said = [token for answers in plain.values() for answer in answers for token in answer]
    return sum(token in known for token in said) / len(said) if known else None


def _head(llm: LLM) -> tuple[int, int, int]:
    """Rows, bits and bytes of the head that the draft uses, with weights and scales in the checkpoint's own type."""
    specs = {spec.name: spec for spec in llm.plan.tensors}
    if not any(name.startswith("draft.") for name in specs):
        return 0, 0, 0
    names = ("draft.lm_head", "draft.embed_tokens", "lm_head", "embed_tokens")
    spec = next(specs[name] for name in names if name in specs)
    itemsize = llm.config.dtype.itemsize if llm.config.dtype is not None else 2
    if spec.quant is None:
        return spec.shape[0], 8 * itemsize, prod(spec.shape) * itemsize
    regions = canonical_regions(spec)
    sizes = (np.dtype(region.dtype).itemsize if region.dtype else itemsize for region in regions)
    num_bytes = sum(prod(region.shape) * size for region, size in zip(regions, sizes, strict=True))
    return spec.shape[0], spec.quant.bits, num_bytes
