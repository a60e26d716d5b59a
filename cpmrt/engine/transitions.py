"""The pure part of the engine: which step comes next for a sequence, and what a result changes. No clock, no device.

`admit`, `submitted`, `apply` and `finish` change nothing but the sequence they are given.
"""

from __future__ import annotations

from collections.abc import Iterator

from cpmrt.engine.prefix_cache import HeldPages
from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.engine.speculation import PLAIN
from cpmrt.executor import Admit, Decode, ExecutorLimits, Prefill, Recall, Release, SlotResult, Speculate, Step

_NOTHING = SlotResult()


def num_reserved(request: Request, limits: ExecutorLimits) -> int:
    """Tokens that the request's pages must hold, those that are drafted past its end among them."""
    return min(len(request.prompt_ids) + request.max_new_tokens + limits.num_draft, limits.max_context)


def admit(seq: Sequence, slot: int, pages: HeldPages | None = None) -> Admit:
    """Give the sequence a slot, and pages (None: those of the slot)."""
    seq.slot, seq.phase, seq.pages = slot, Phase.PREFILL, pages
    if pages is not None:
        seq.num_cached = seq.num_prefilled = seq.num_computed = pages.num_cached
    request, table = seq.request, pages.table if pages else ()
    return Admit(slot, request.sampling, request.seed, request.max_new_tokens, request.stop_token_ids, table)


def recalls(seq: Sequence, limits: ExecutorLimits) -> Iterator[Recall]:
    """Steps that make the cached part of the prompt count, for a request or a draft that looks at it."""
    if seq.request.sampling.repetition_penalty == 1 and not limits.tree_shapes:
        return
    for start in range(0, seq.num_cached, limits.prefill_chunk):
        end = min(start + limits.prefill_chunk, seq.num_cached)
        yield Recall(seq.slot, seq.request.prompt_ids[start:end])


def next_prefill(seq: Sequence, limits: ExecutorLimits) -> Prefill:
    """The next chunk of the prompt."""
    prompt, start = seq.request.prompt_ids, seq.num_prefilled
    end = min(start + limits.prefill_chunk, len(prompt))
    return Prefill(seq.slot, prompt[start:end], start, end == len(prompt))


def wants_decode(seq: Sequence) -> bool:
    """Whether another decode step can give a token that is still wanted, as far as is known now."""
    expected = len(seq.token_ids) + seq.num_in_flight
    return seq.phase is Phase.DECODE and expected < seq.request.max_new_tokens


def next_shape(sequences: tuple[Sequence, ...], limits: ExecutorLimits) -> int:
    """The tree for the next step of all of them, or PLAIN. A sequence alone is drafted for.

    Several together decode plainly: each brings a row that is right for certain, which no draft is.
    """
    if not limits.tree_shapes or len(sequences) != 1:
        return PLAIN
    seq = sequences[0]
    if seq.policy is None:
        return 0
    return seq.policy.choose(seq.request.max_new_tokens - len(seq.token_ids) - seq.num_in_flight)


def decode_step(sequences: tuple[Sequence, ...], shape: int) -> Decode | Speculate:
    """The step for a choice of `next_shape`."""
    slots = tuple(seq.slot for seq in sequences)
    return Decode(slots) if shape == PLAIN else Speculate((slots[0],), shape)


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
    if isinstance(step, Prefill):
        seq.num_computed = step.position + len(step.token_ids)
        if not step.is_last:
            return _NOTHING
    seq.num_in_flight -= 1
    new = result.token_ids
    if not new or seq.finish_reason is not None:
        return _NOTHING
    kept = _num_wanted(seq, new)
    if kept < len(new):
        result = SlotResult(new[:kept], result.logprobs[:kept])
    seq.token_ids.extend(result.token_ids)
    if isinstance(step, Speculate):
        _count(seq, step.shape, kept)
    return result


def _num_wanted(seq: Sequence, new: tuple[int, ...]) -> int:
    """How many of these tokens come before the end of the sequence, which is noted."""
    request = seq.request
    stops, room = request.stop_token_ids, request.max_new_tokens - len(seq.token_ids)
    for number, token in enumerate(new, 1):
        if token in stops:
            finish(seq, "stop")
            return number
        if number == room:
            finish(seq, "length")
            return number
    return len(new)


def _count(seq: Sequence, shape: int, num_tokens: int) -> None:
    is_last = seq.finish_reason is not None
    if seq.accepts is not None:
        seq.accepts.add(shape, num_tokens, is_last=is_last)
    if seq.policy is not None and not is_last:
        seq.policy.observe(shape, num_tokens)


def finish(seq: Sequence, reason: str) -> None:
    """End the sequence; its slot may be released."""
    seq.phase, seq.finish_reason = Phase.FINISHED, reason


def release(seq: Sequence) -> Release:
    """The step that gives its slot back."""
    return Release(seq.slot)
