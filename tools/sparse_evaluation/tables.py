"""Results, as they are kept in JSON, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def tables(results: Results) -> Iterator[str]:
    """A table, with what was measured above it, for every part that there is."""
    writers = {"needles": _needles, "text": _text, "mass": _mass, "asked": _asked, "unions": _unions}
    for part, write in writers.items():
        if part in results:
            yield "\n".join(write(results[part]))


def _needles(part: Results) -> Iterator[str]:
    lengths = part["lengths"]
    yield f"Statements found again, in % of {part['questions']} questions a cell, by tokens of context:\n"
    yield from _head(["setting", "blocks (by score)", *map(_thousands, lengths)])
    for label, row in part["settings"].items():
        cells = [f"{100 * sum(row['grid'][str(length)]) / len(row['grid'][str(length)]):.1f}" for length in lengths]
        yield _line([label, row["budget"], *cells])
    decoded = [row["decoded"] for row in part["settings"].values()]
    asked, same = (sum(counts[name] for counts in decoded) for name in ("asked", "same"))
    yield f"\nOf {asked} questions asked again by decoding, {same} gave the same."


def _text(part: Results) -> Iterator[str]:
    rows = part["settings"]
    spans = [f"{_thousands(span['low'])}-{_thousands(span['high'])}" for span in next(iter(rows.values()))]
    counts = ", ".join(str(span["count"]) for span in next(iter(rows.values())))
    yield "Perplexity, KL(dense || sparse) in thousandths of a nat, and equal greedy tokens, by position in"
    yield f"{part['windows']} texts of {part['length']} tokens ({counts} predictions; {part['provenance']}):\n"
    yield from _head(["setting", *spans])
    for label, spans_of in rows.items():
        yield _line([label, *(_divergence(span) for span in spans_of)])


def _divergence(span: Results) -> str:
    return f"{span['perplexity']:.3f}; {1000 * span['kl']:.2f}; {100 * span['agreement']:.1f} %"


def _mass(part: Results) -> Iterator[str]:
    yield f"Dense attention inside the chosen blocks, in %, in a text of {part['length']} tokens: every layer and query"
    yield "head at the positions that leave blocks out; in brackets, what the best blocks would hold:\n"
    yield from _shares(part)


def _asked(part: Results) -> Iterator[str]:
    yield f"The same where statements are asked for, at the end of {part['length']} tokens:\n"
    yield from _shares(part)


def _unions(part: Results) -> Iterator[str]:
    yield "Blocks that neighbouring tokens choose together, official settings: mean over layers and KV heads, lowest"
    yield "and highest of these; in brackets, what random scores would give:\n"
    counts = list(next(iter(part.values()), {}))
    yield from _head(["tokens", *(f"{count} neighbours" for count in counts)])
    for length, row in part.items():
        yield _line([_thousands(int(length)), *(_union(row[count]) for count in counts)])


def _union(cell: Results) -> str:
    means = [mean for layer in cell["unions"] for mean in layer]
    mean, low, high = sum(means) / len(means), min(means), max(means)
    return f"{mean:.0f}, {low:.0f} to {high:.0f} ({cell['chance']:.0f})"


def _shares(part: Results) -> Iterator[str]:
    yield from _head(["setting", "positions", "mean", "lowest tenth", "worst layer"])
    for label, row in part["settings"].items():
        names = ("mean", "tenth", "layer") if row else ()
        cells = [f"{_percent(row[name])} ({_percent(row['best_' + name])})" for name in names]
        yield _line([label, str(row.get("rows", 0)), *(cells or ["-"] * 3)])


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _line(names)
    yield _line(["---"] * len(names))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _thousands(count: int) -> str:
    return f"{count // 1024}K" if count and count % 1024 == 0 else str(count)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
