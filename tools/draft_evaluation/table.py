"""Outcomes as Markdown tables for people, and as records for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from draft_evaluation.measurement import Cell, Outcome, shape_label

FEWEST_STEPS = 10
"""A rate out of fewer steps is not shown."""


def draft_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row for each draft and tree; a cell has tokens a step, then the accept rates by depth in %."""
    yield from _rows("| draft | tree |", outcomes[0].counts)
    for outcome in outcomes:
        yield _row(f"| {outcome.variant.draft} | {shape_label(outcome.variant.shape)} |", outcome, with_rates=True)


def head_table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A row for each head; a cell has tokens a step. `covered` is the share of the model's own tokens in the head."""
    yield from _rows("| tokens | covered | bits | KiB |", outcomes[0].counts)
    for outcome in outcomes:
        covered = "-" if outcome.covered is None else f"{outcome.covered:.1%}"
        first = f"| {outcome.head_rows} | {covered} | {outcome.head_bits} | {_kib(outcome.head_bytes)} |"
        yield _row(first, outcome, with_rates=False)


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """An object for each cell."""
    variant = outcome.variant
    common = {
        "draft": variant.draft,
        "shape": astuple(variant.shape),
        "head_rows": outcome.head_rows,
        "head_bits": outcome.head_bits,
        "head_bytes": outcome.head_bytes,
        "covered": outcome.covered,
    }
    return [
        common
        | {
            "text": text,
            "temperature": temperature,
            "steps": counts.num_steps,
            "tokens": counts.num_tokens,
            "mean_accept_length": counts.num_tokens / counts.num_steps if counts.num_steps else None,
            "accept_rates": counts.rates,
            "accept_histogram": counts.histogram,
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
