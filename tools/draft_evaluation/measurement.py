"""Measures drafts: continues the same prompts without and with each, counts accepted tokens, writes tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from cpmrt import LLM, SamplingParams
from cpmrt.config import TreeShape
from cpmrt.engine.stats import AcceptCounts
from cpmrt.errors import CpmrtError
from cpmrt.memory.packed_regions import canonical_regions
from cpmrt.reference.executor import ReferenceExecutor
from draft_evaluation.prompts import FrequentTokens, Prompts

Cell = tuple[str, float]
"""A column of the tables: the name of a text, and a temperature."""
TokenIds = tuple[int, ...]
FEWEST_STEPS = 10
"""The fewest steps out of which an accept rate is shown."""


class ChangedTokensError(CpmrtError):
    """A draft changed the tokens of the model, which no draft may do."""


@dataclass(frozen=True)
class Variant:
    """A draft and its settings.

    `index` has the tokens that the draft's head is cut to, None for the whole head. `inner` is the draft of a small
    model that drafts.
    """

    draft: str
    shape: TreeShape
    index: FrequentTokens | None = None
    head_bits: int | None = None
    layer_bits: int | None = None
    inner: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments of LLM."""
        wishes: dict[str, Any] = {"shapes": [self.shape], "adaptive": False}
        if self.index is not None:
            wishes["draft_vocab"] = str(self.index.path)
        for name in ("head_bits", "layer_bits", "inner"):
            if (value := getattr(self, name)) is not None:
                wishes[name] = value
        return {"draft": self.draft, "speculate": wishes}

    def __str__(self) -> str:
        size = [] if self.index is None else [f"head of {len(self.index.token_ids)} tokens"]
        bits = [] if self.head_bits is None else [f"head in {self.head_bits} bits"]
        inner = [] if self.inner is None else [f"with {self.inner}"]
        return ", ".join([f"{self.draft} ({shape_label(self.shape)})", *size, *bits, *inner])


@dataclass(frozen=True)
class Outcome:
    """The result of one variant: the counts of each cell, and the rows, bits and bytes of the head that a pass reads.

    The head's figures are 0 for a draft without one. `covered` is the share of the model's own tokens that are in the
    head, None if that is not known. `passes` has the draft's passes without those of an inner draft; only the NumPy
    executor counts them.
    """

    variant: Variant
    counts: Mapping[Cell, AcceptCounts]
    head_rows: int
    head_bits: int
    head_bytes: int
    covered: float | None
    passes: Mapping[Cell, int] = field(default_factory=dict)


def shape_label(shape: TreeShape) -> str:
    """Returns the label of a shape: PASSES, TOPK, SIZE or the length of a chain, then its lookup length, if any."""
    tree = replace(shape, lookup_length=0)
    numbers = f"{shape.num_passes}, {shape.top_k}, {shape.tree_size}"
    label = f"chain of {shape.num_passes}" if tree == TreeShape.chain(shape.num_passes) else numbers
    return f"{label}, lookup of {shape.lookup_length}" if shape.lookup_length else label


def plain_tokens(
    llm: LLM, texts: Mapping[str, Prompts], temperatures: Sequence[float], num_tokens: int
) -> dict[Cell, list[TokenIds]]:
    """Returns the tokens that the model gives for each prompt without a draft, by cell."""
    return {
        (name, temperature): [tokens for tokens, _ in _continued(llm, prompts, temperature, num_tokens)]
        for name, prompts in texts.items()
        for temperature in temperatures
    }


def measure(
    llm: LLM, variant: Variant, texts: Mapping[str, Prompts], plain: Mapping[Cell, list[TokenIds]], num_tokens: int
) -> Outcome:
    """Continues the same prompts with a draft. Raises ChangedTokensError where a token differs from `plain`."""
    counts, passes = {}, {}
    for (name, temperature), expected in plain.items():
        total, before = AcceptCounts(llm.engine.limits), _num_passes(llm)
        continued = _continued(llm, texts[name], temperature, num_tokens)
        for number, (wanted, (tokens, accepts)) in enumerate(zip(expected, continued, strict=True)):
            where = f"{variant}: prompt {number} of {name} at temperature {temperature:g}"
            _check(where, tokens, wanted)
            if accepts is not None:
                total.merge(accepts)
        counts[name, temperature], passes[name, temperature] = total, _num_passes(llm) - before
    rows, bits, num_bytes = _head(llm)
    known = range(llm.config.vocab_size if rows == llm.config.vocab_size else 0)
    share = _share(plain, known if variant.index is None else set(variant.index.token_ids))
    return Outcome(variant, counts, rows, bits, num_bytes, share, passes)


def _num_passes(llm: LLM) -> int:
    return llm.executor.num_draft_passes if isinstance(llm.executor, ReferenceExecutor) else 0


def _continued(
    llm: LLM, prompts: Prompts, temperature: float, num_tokens: int
) -> Iterator[tuple[TokenIds, AcceptCounts | None]]:
    """Yields the tokens and accept counts of each prompt; the figures of `completion.stats` could not be added up."""
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
    """Returns rows, bits and bytes of the head that the draft uses, weights and scales in the checkpoint's own type."""
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


def draft_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields a row for each draft and tree; a cell has tokens a step, then the accept rates by depth in %."""
    yield from _rows("| draft | tree |", outcomes[0].counts)
    for outcome in outcomes:
        yield _row(f"| {outcome.variant.draft} | {shape_label(outcome.variant.shape)} |", outcome, with_rates=True)


def head_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields a row for each head; a cell has tokens a step. `covered` is the share of the model's own tokens in it."""
    yield from _rows("| tokens | covered | bits | KiB |", outcomes[0].counts)
    for outcome in outcomes:
        covered = "-" if outcome.covered is None else f"{outcome.covered:.1%}"
        first = f"| {outcome.head_rows} | {covered} | {outcome.head_bits} | {_kib(outcome.head_bytes)} |"
        yield _row(first, outcome, with_rates=False)


def pass_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields a row for each chain and draft of the small model; a cell has tokens a step, then passes a step."""
    yield from _rows("| chain of | its own draft |", outcomes[0].counts)
    for outcome in outcomes:
        means = (
            f"{counts.num_tokens / counts.num_steps:.2f}, {outcome.passes[cell] / counts.num_steps:.2f}"
            for cell, counts in outcome.counts.items()
        )
        yield f"| {outcome.variant.shape.num_passes} | {outcome.variant.inner or '-'} | {' | '.join(means)} |"


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """Returns an object for each cell, for JSON."""
    variant = outcome.variant
    common = {
        "draft": variant.draft,
        "shape": astuple(variant.shape),
        "head_rows": outcome.head_rows,
        "head_bits": outcome.head_bits,
        "head_bytes": outcome.head_bytes,
        "covered": outcome.covered,
        "inner": variant.inner,
    }
    return [
        common
        | {
            "text": text,
            "temperature": temperature,
            "steps": counts.num_steps,
            "tokens": counts.num_tokens,
            "mean_accept_length": counts.figures.get("mean_accept_length"),
            "accept_rates": counts.rates,
            "accept_histogram": counts.histogram,
            "passes": outcome.passes.get((text, temperature)),
        }
        for (text, temperature), counts in outcome.counts.items()
    ]


def _rows(first: str, cells: Mapping[Cell, Any]) -> Iterator[str]:
    names = [name if temperature == 0 else f"{name}, T = {temperature:g}" for name, temperature in cells]
    yield f"{first} {' | '.join(names)} |"
    yield "|" + " --- |" * (first.count("|") - 1 + len(names))


def _row(first: str, outcome: Outcome, *, with_rates: bool) -> str:
    cells = []
    for counts in outcome.counts.values():
        mean = f"{counts.num_tokens / counts.num_steps:.2f}" if counts.num_steps else "-"
        shown = [rate for depth, rate in enumerate(counts.rates) if sum(counts.histogram[depth:]) >= FEWEST_STEPS]
        rates = " ".join(f"{100 * rate:.0f}" for rate in shown)
        cells.append(f"{mean}: {rates}" if with_rates and rates else mean)
    return f"{first} {' | '.join(cells)} |"


def _kib(count: int) -> str:
    return f"{count / 1024:.0f}" if count >= 1 << 17 else f"{count / 1024:.1f}"
