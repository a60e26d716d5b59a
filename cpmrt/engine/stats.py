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

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of those that had to be computed."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    @classmethod
    def of(cls, seq: Sequence) -> GenerationStats:
        """The figures of a sequence so far."""
        started = bool(seq.token_ids)
        return cls(
            prompt_tokens=len(seq.request.prompt_ids),
            new_tokens=len(seq.token_ids),
            prefill_s=seq.first_token_at - seq.added_at if started else 0.0,
            decode_s=seq.last_token_at - seq.first_token_at if started else 0.0,
            mean_accept_length=seq.num_speculated_tokens / seq.num_speculations if seq.num_speculations else None,
            cached_tokens=seq.num_cached,
        )
