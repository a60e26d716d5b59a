"""What one generation cost."""

from __future__ import annotations

from dataclasses import dataclass

from cpmrt.engine.sequence import Sequence


@dataclass(frozen=True)
class GenerationStats:
    """Counts and seconds of one sequence. Prefill ends with the first token, which decode therefore excludes."""

    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    mean_accept_length: float | None
    """Tokens a speculative step gave on average; None without speculation."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    accept_histogram: tuple[int, ...] = ()
    """Index n: speculative steps that gave n + 1 tokens. The token of the prefill is in none."""
    accept_rates: tuple[float, ...] = ()
    """Depth by depth: of the steps that accepted the token above, how many accepted one there too."""
    draft_ms: float | None = None
    """Of a speculative step on average, as measured at start; None: unknown. So are the next two."""
    verify_ms: float | None = None
    rest_ms: float | None = None

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of those that had to be computed."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    @property
    def speculative_steps(self) -> int:
        return sum(self.accept_histogram)

    @property
    def speculative_tokens(self) -> int:
        """Tokens that they gave."""
        return sum(count * number for number, count in enumerate(self.accept_histogram, 1))

    @classmethod
    def of(cls, seq: Sequence) -> GenerationStats:
        """The figures of a sequence so far."""
        started = bool(seq.token_ids)
        counts = seq.accepts if seq.accepts and seq.accepts.num_steps else None
        draft_ms, verify_ms, rest_ms = counts.parts_ms if counts else (None, None, None)
        return cls(
            prompt_tokens=len(seq.request.prompt_ids),
            new_tokens=len(seq.token_ids),
            prefill_s=seq.first_token_at - seq.added_at if started else 0.0,
            decode_s=seq.last_token_at - seq.first_token_at if started else 0.0,
            mean_accept_length=counts.num_tokens / counts.num_steps if counts else None,
            cached_tokens=seq.num_cached,
            accept_histogram=tuple(counts.histogram) if counts else (),
            accept_rates=counts.rates if counts else (),
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            rest_ms=rest_ms,
        )
