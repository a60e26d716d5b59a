"""The pure part of the engine: it chooses the next step of a sequence and applies results. No clock, no device.

`admit`, `submitted`, `apply` and `finish` change nothing but the sequence they are given.
"""

from __future__ import annotations

from collections.abc import Iterator

from cpmrt.engine.prefix_cache import HeldPages
from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.engine.speculation import PLAIN
from cpmrt.errors import NonFiniteLogitsError
from cpmrt.executor import Admit, Decode, ExecutorLimits, Keep, Prefill, Recall, SlotResult, Speculate, Step

_NOTHING = SlotResult()


def num_reserved(request: Request, limits: ExecutorLimits) -> int:
    """Return how many tokens the request's pages must hold, including those that are drafted past its end."""
    return min(len(request.prompt_ids) + request.max_new_tokens + limits.num_draft, limits.max_context)


def admit(seq: Sequence, slot: int, pages: HeldPages | None = None) -> Admit:
    """Give the sequence a slot and pages (None: those of the slot), and return the step that admits it."""
    seq.slot, seq.phase, seq.pages = slot, Phase.PREFILL, pages
    if pages is not None:
        seq.num_cached = seq.num_prefilled = seq.num_computed = pages.num_cached
    request, table = seq.request, pages.table if pages else ()
    return Admit(
        slot, request.sampling, request.seed, request.max_new_tokens, request.stop_token_ids, table,
        pages.resumed if pages else None,
    )  # fmt: skip


def recalls(seq: Sequence, limits: ExecutorLimits) -> Iterator[Recall]:
    """Yield the steps that tell the executor the cached part of the prompt, if penalties or a draft look at it."""
    if seq.request.sampling.repetition_penalty == 1 and not limits.tree_shapes:
        return
    for start in range(0, seq.num_cached, limits.prefill_chunk):
        end = min(start + limits.prefill_chunk, seq.num_cached)
        yield Recall(seq.slot, seq.request.prompt_ids[start:end])


def next_prefill(seq: Sequence, limits: ExecutorLimits) -> Prefill:
    """Return the step for the next chunk of the prompt; one ends where the state is to be kept."""
    prompt, start = seq.request.prompt_ids, seq.num_prefilled
    end = min(start + limits.prefill_chunk, len(prompt))
    if seq.pages and start < seq.pages.border:
        end = min(end, seq.pages.border)
    return Prefill(seq.slot, prompt[start:end], start, end == len(prompt))


def keep_state(seq: Sequence) -> Keep | None:
    """Return the step that keeps the state for other sequences, if the last chunk ended where it is to be kept."""
    if seq.pages is None or seq.pages.reserved is None or seq.num_prefilled != seq.pages.border:
        return None
    return Keep(seq.slot, seq.pages.reserved)


def wants_decode(seq: Sequence) -> bool:
    """Tell whether another decode step can give a token that is still wanted, as far as is known now."""
    expected = len(seq.token_ids) + seq.num_in_flight
    return seq.phase is Phase.DECODE and expected < seq.request.max_new_tokens


def next_shape(sequences: tuple[Sequence, ...], limits: ExecutorLimits) -> int:
    """Choose the tree shape for the next step of these sequences, or PLAIN.

    Only a sequence that decodes alone is drafted for. Several together decode plainly: a row of another sequence gives
    a token for certain, a drafted row only if it is accepted.
    """
    if not limits.tree_shapes or len(sequences) != 1:
        return PLAIN
    seq = sequences[0]
    if seq.policy is None:
        return 0
    return seq.policy.choose(seq.request.max_new_tokens - len(seq.token_ids) - seq.num_in_flight)


def decode_step(sequences: tuple[Sequence, ...], shape: int) -> Decode | Speculate:
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
    """Add a result to the sequence and return what it gained (nothing once it has finished).

    The executor stops at end tokens and at the limit by itself. Tokens are cut off here too, so that an executor that
    accepts several tokens a step can never push one past the end.
    """
    if isinstance(step, Prefill):
        seq.num_computed = step.position + len(step.token_ids)
        if not step.is_last:
            return _NOTHING
    seq.num_in_flight -= 1
    new = result.token_ids
    if seq.finish_reason is not None or not (new or result.non_finite):
        return _NOTHING
    kept = _num_wanted(seq, new)
    if kept < len(new):
        result = SlotResult(new[:kept], result.logprobs[:kept])
    seq.token_ids.extend(result.token_ids)
    if result.non_finite and seq.finish_reason is None:
        _fail(seq)
    if isinstance(step, Speculate) and kept:
        _count(seq, step.shape, kept)
    return result


def _fail(seq: Sequence) -> None:
    """End a sequence whose next token cannot be sampled."""
    seq.failure = NonFiniteLogitsError(
        f"the logits for position {len(seq.request.prompt_ids) + len(seq.token_ids)} are not finite",
        expected="numbers", actual="NaN or infinity",
        fix="look for NaN and infinity in the weights, or use dtype bfloat16 or float32: float16 ends at 65504",
    )  # fmt: skip
    finish(seq, "cancelled")


def _num_wanted(seq: Sequence, new: tuple[int, ...]) -> int:
    """Return how many of these tokens belong to the sequence, and finish it if they reach its end."""
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


def cut(seq: Sequence, num_tokens: int) -> None:
    """Take back the tokens after the first `num_tokens`, all of which the last step gave."""
    surplus = len(seq.token_ids) - num_tokens
    del seq.token_ids[num_tokens:]
    if surplus and seq.accepts is not None:
        seq.accepts.take_back(surplus)


def finish(seq: Sequence, reason: str) -> None:
    """End the sequence; its slot may be released."""
    seq.phase, seq.finish_reason = Phase.FINISHED, reason
