"""The pure part of the engine: which step comes next for a sequence, and what a result changes. No clock, no device.

`admit`, `submitted`, `apply` and `finish` change nothing but the sequence they are given.
"""

from __future__ import annotations

from cpmrt.engine.sequence import Phase, Sequence
from cpmrt.executor import Admit, Decode, ExecutorLimits, Prefill, Release, SlotResult, Speculate, Step


def admit(seq: Sequence, slot: int) -> Admit:
    """Give the sequence a slot."""
    seq.slot, seq.phase = slot, Phase.PREFILL
    request = seq.request
    return Admit(slot, request.sampling, request.seed, request.max_new_tokens, request.stop_token_ids)


def next_prefill(seq: Sequence, limits: ExecutorLimits) -> Prefill:
    """The next chunk of the prompt."""
    prompt, start = seq.request.prompt_ids, seq.num_prefilled
    end = min(start + limits.prefill_chunk, len(prompt))
    return Prefill(seq.slot, prompt[start:end], start, end == len(prompt))


def wants_decode(seq: Sequence) -> bool:
    """Whether another decode step can give a token that is still wanted, as far as is known now."""
    expected = len(seq.token_ids) + seq.num_in_flight
    return seq.phase is Phase.DECODE and expected < seq.request.max_new_tokens


def next_decode(sequences: list[Sequence], limits: ExecutorLimits) -> Decode | Speculate:
    """One step for all of them."""
    slots = tuple(seq.slot for seq in sequences)
    return Speculate(slots) if limits.num_draft else Decode(slots)


def submitted(seq: Sequence, step: Step) -> None:
    """Note that a step with this sequence is on its way."""
    if isinstance(step, Prefill):
        seq.num_prefilled += len(step.token_ids)
        if step.is_last:
            seq.phase = Phase.DECODE
            seq.num_in_flight += 1
    else:
        seq.num_in_flight += 1


def apply(seq: Sequence, step: Step, result: SlotResult) -> SlotResult:
    """Take a result in; returns what the sequence gained (nothing once it has finished).

    The executor stops at end tokens and at the limit by itself. The cut is made here too, so that an executor that
    accepts several tokens a step can never push one past the end.
    """
    if isinstance(step, Prefill) and not step.is_last:
        return SlotResult()
    seq.num_in_flight -= 1
    if seq.phase is Phase.FINISHED:
        return SlotResult()
    kept = _kept(seq, result.token_ids)
    seq.token_ids.extend(result.token_ids[:kept])
    if isinstance(step, Speculate) and kept:
        seq.num_speculations += 1
        seq.num_speculated_tokens += kept
    if seq.token_ids and seq.token_ids[-1] in seq.request.stop_token_ids:
        finish(seq, "stop")
    elif len(seq.token_ids) == seq.request.max_new_tokens:
        finish(seq, "length")
    return SlotResult(result.token_ids[:kept], result.logprobs[:kept])


def _kept(seq: Sequence, token_ids: tuple[int, ...]) -> int:
    """How many of the new tokens come before the end."""
    room = seq.request.max_new_tokens - len(seq.token_ids)
    for index, token in enumerate(token_ids[:room]):
        if token in seq.request.stop_token_ids:
            return index + 1
    return min(room, len(token_ids))


def finish(seq: Sequence, reason: str) -> None:
    """End the sequence; its slot may be released."""
    seq.phase, seq.finish_reason = Phase.FINISHED, reason


def release(seq: Sequence) -> Release:
    """The step that gives its slot back."""
    return Release(seq.slot)
