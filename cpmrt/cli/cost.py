"""What a generation cost, as text."""

from __future__ import annotations

from cpmrt.engine import GenerationStats
from cpmrt.generation import Completion


def summary(completion: Completion) -> str:
    """On one line."""
    stats = completion.stats
    parts = [
        f"prompt {stats.prompt_tokens} tokens in {stats.prefill_s:.2f} s ({stats.prefill_tokens_per_s:.1f} tok/s)",
        f"new {stats.new_tokens} tokens in {stats.decode_s:.2f} s ({stats.decode_tokens_per_s:.1f} tok/s)",
        f"finish: {completion.finish_reason}",
    ]
    if stats.mean_accept_length is not None:
        parts.append(f"mean accept length {stats.mean_accept_length:.2f}")
    return ", ".join(parts)


def cost_lines(completion: Completion) -> list[str]:
    """The summary, and what speculation came to, where there was any."""
    return [summary(completion), *_speculation_lines(completion.stats)]


def _speculation_lines(stats: GenerationStats) -> list[str]:
    steps = stats.speculative_steps
    if not steps:
        return []
    shares = [f"{number}: {count / steps:.0%}" for number, count in enumerate(stats.accept_histogram, 1) if count]
    lines = [
        f"speculative steps {steps}, of {stats.new_tokens - 1 - stats.speculative_tokens + steps} decode steps; "
        f"by the tokens they gave {', '.join(shares)}"
    ]
    if stats.accept_rates:
        rates = [f"{depth}: {rate:.0%}" for depth, rate in enumerate(stats.accept_rates, 1)]
        lines.append(f"accept rate by depth {', '.join(rates)}")
    if stats.draft_ms is not None:
        lines.append(
            f"a speculative step: draft {stats.draft_ms:.3f} ms, verify {stats.verify_ms:.3f} ms, "
            f"rest {stats.rest_ms:.3f} ms (measured at start)"
        )
    return lines
