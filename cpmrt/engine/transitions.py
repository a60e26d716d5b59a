"""The pure part of the engine: it chooses the next step of a sequence and applies results. No clock, no device.

Its functions change nothing but the sequence they are given; `release_pages` also gives its pages to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from cpmrt.engine.draft_policy import PLAIN
from cpmrt.engine.guide import Guide
from cpmrt.engine.guide import fill_masks as fill_masks_of
from cpmrt.engine.loops import LoopGuard
from cpmrt.engine.prefix_cache import HeldPages, PrefixCache
from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.errors import MaskError, NonFiniteLogitsError
from cpmrt.executor import (
    MAX_ROWS,
    Admit,
    Decode,
    ExecutorLimits,
    Keep,
    Mask,
    Prefill,
    Recall,
    SlotResult,
    Speculate,
    Step,
    TokenLogprobs,
)

_NOTHING = SlotResult()


def num_reserved(request: Request, limits: ExecutorLimits) -> int:
    """Return how many tokens the request's pages must hold, including those that are drafted past its end."""
    return min(len(request.prompt_ids) + request.max_new_tokens + limits.num_draft, limits.max_context)


def admit(seq: Sequence, slot: int, pages: HeldPages | None = None) -> Admit:
    """Give the sequence a slot and pages (None: those of the slot), and return the step that admits it."""
    seq.slot, seq.phase, seq.pages = slot, Phase.PREFILL, pages
    if pages is not None:
        seq.num_prefilled = seq.num_computed = pages.num_cached
        if not seq.token_ids:
            seq.num_cached = pages.num_cached
    return _admission(seq, pages.resumed if pages else None)


def _admission(seq: Sequence, snapshot: int | None) -> Admit:
    request, table = seq.request, seq.pages.table if seq.pages else ()
    return Admit(seq.slot, seq.sampling, request.seed, seq.room, request.stop_token_ids, table, snapshot)


def recalls(seq: Sequence, limits: ExecutorLimits) -> Iterator[Recall]:
    """Yield the steps that tell the executor the cached part of the text, if penalties or a draft look at it."""
    if seq.sampling.repetition_penalty == 1 and not limits.tree_shapes:
        return
    for start in range(0, seq.num_prefilled, limits.prefill_chunk):
        end = min(start + limits.prefill_chunk, seq.num_prefilled)
        yield Recall(seq.slot, seq.text[start:end])


def next_prefill(seq: Sequence, limits: ExecutorLimits) -> Prefill:
    """Return the step for the next chunk of the text. A chunk ends at each border where the state is to be kept."""
    text, start = seq.text, seq.num_prefilled
    end = min(start + limits.prefill_chunk, len(text))
    borders = seq.pages.borders if seq.pages else ()
    end = min((end, *(border for border in borders if border > start)))
    is_last = end == len(text)
    mask = seq.guide.next_mask() if seq.guide and is_last else None
    return Prefill(seq.slot, text[start:end], start, is_last, mask)


def keep_state(seq: Sequence) -> Keep | None:
    """Return the step that keeps the state for other sequences, if the last chunk ended where it is to be kept."""
    snapshot = seq.pages.borders.get(seq.num_prefilled) if seq.pages else None
    return None if snapshot is None else Keep(seq.slot, snapshot)


def wants_decode(seq: Sequence) -> bool:
    """Tell whether another decode step can give a token that is still wanted, as far as is known now."""
    expected = len(seq.token_ids) + seq.num_in_flight
    return seq.phase is Phase.DECODE and expected < seq.num_wanted


def awaits_mask(seq: Sequence, *, may_draft: bool, is_lending: bool, is_alone: bool, num_awaited: int) -> bool:
    """Tell whether a sequence that decodes cannot take a further step yet. `num_awaited`: all steps in flight.

    Mostly its last step but one must be done. If a slot is lent, all its steps must be, since its next mask is known
    then. If its next step drafts, or its last one did, all steps of all sequences must be: the thread that waits for a
    tree gives it its masks. But a tree may follow one that `is_alone`: nothing else runs, waits or is in flight.
    """
    if seq.guide is None:
        return False
    will_draft = may_draft and (seq.policy is None or seq.policy.will_draft(seq.room - seq.num_in_flight))
    if will_draft:
        return num_awaited > 0 and not (is_alone and seq.guide.may_draft_ahead)
    return not seq.guide.is_ready or (is_lending and seq.num_in_flight > 0)


def have_empty_mask(sequences: Iterable[Sequence]) -> bool:
    """Tell whether the mask of a step in flight may be empty, so that whoever waits for the executor waits for ever.

    The holder of a loan waits for it, and so may an admission, which can take many steps.
    """
    return any(seq.guide is not None and not seq.guide.is_ready for seq in sequences)


def may_draft(sequences: tuple[Sequence, ...], limits: ExecutorLimits, is_lending: bool) -> bool:
    """Tell whether the next step of these sequences may draft; `is_lending`: whether any slot is lent.

    More sequences than the executor drafts for at a time decode plainly, and so do several if one has a grammar. The
    masks of a tree are not known when its step is submitted, and the holder of a lent slot may wait for the executor.
    """
    if not limits.tree_shapes or not sequences or not limits.shapes_for(len(sequences)):
        return False
    if len(sequences) > 1:
        return not any(seq.guide for seq in sequences)
    return sequences[0].guide is None or (limits.takes_tree_masks and not is_lending)


def next_shape(seq: Sequence) -> int:
    """Choose the tree shape for the next step of a sequence that may draft, or PLAIN.

    Under a grammar nothing is drafted where a plain step brings certain tokens.
    """
    if seq.guide is not None and not seq.num_in_flight and seq.guide.has_run:
        return PLAIN
    if seq.policy is None:
        return 0
    return seq.policy.choose(seq.room - seq.num_in_flight)


def decode_step(sequences: tuple[Sequence, ...], shape: int, limits: ExecutorLimits) -> Decode | Speculate:
    """Return the next step. Its plain masks are filled if the executor cannot run ahead, as it needs them at once."""
    slots = tuple(seq.slot for seq in sequences)
    if shape != PLAIN:
        guide, room = sequences[0].guide, sequences[0].room
        return Speculate(slots, shape, guide.tree_masks(room) if guide else None)
    if not any(seq.guide for seq in sequences):
        return Decode(slots)
    masks, certain = list[Mask | None](), list[tuple[int, ...]]()
    for seq, count in zip(sequences, _num_certain(sequences, limits), strict=True):
        mask, brought = seq.guide.next_step(count) if seq.guide else (None, ())
        masks.append(mask)
        certain.append(brought)
    if limits.run_ahead == 1:
        fill_masks_of([seq.guide for seq in sequences if seq.guide])
    return Decode(slots, tuple(masks), tuple(certain) if any(certain) else ())


def _num_certain(sequences: tuple[Sequence, ...], limits: ExecutorLimits) -> list[int]:
    """Return how many certain tokens each sequence brings along in the next step.

    If they are fewer than half as many as the sequences, they get only the rows by which the step is padded anyway.
    """
    wishes = [seq.guide.num_certain(seq.room, is_known=not seq.num_in_flight) if seq.guide else 0 for seq in sequences]
    num_rows, counts = len(sequences), list[int]()
    num_free = max(limits.certain_rows - num_rows, 0)
    if 2 * min(sum(wishes), num_free) < num_rows:
        num_free = min(num_free, next((size for size in limits.row_sizes if size >= num_rows), MAX_ROWS) - num_rows)
    for wish in wishes:
        counts.append(min(wish, num_free))
        num_free -= counts[-1]
    return counts


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
    """Add a result to the sequence and return what it gained (nothing once it has finished). Call `fill_masks` next.

    The executor stops at end tokens and at the limit by itself. Tokens are cut off here too, so that an executor that
    accepts several tokens a step can never push one past the end.
    """
    if isinstance(step, Prefill):
        seq.num_computed = step.position + len(step.token_ids)
        if not step.is_last:
            return _NOTHING
    seq.num_in_flight -= 1
    if seq.phase in (Phase.FINISHED, Phase.PAUSED) or (not result.token_ids and result == _NOTHING):
        return _NOTHING
    tokens, loops, guide = _watch(seq, result.token_ids)
    rest = seq.guide.take(tokens, seq.room, is_drafted=isinstance(step, Speculate)) if seq.guide else ()
    if _has_failed(seq):
        return _NOTHING
    new = (*tokens, *rest) if rest else tokens
    kept = _num_wanted(seq, new, len(tokens) if loops and not rest else 0)
    if kept < len(new) or new != result.token_ids:
        result = replace(result, token_ids=new[:kept], logprobs=result.logprobs[:kept])
    seq.token_ids.extend(result.token_ids)
    if seq.repeats is not None:
        seq.repeats.extend(result.token_ids)
    seq.num_forced = max(0, kept - len(new) + len(rest))
    if guide is not None and kept == len(tokens):
        _bind(seq, guide)
    if (result.non_finite or result.mask_failure) and seq.phase is Phase.DECODE:
        position = len(seq.request.prompt_ids) + len(seq.token_ids)
        failure = result.mask_failure
        seq.failure = MaskError.of(failure) if failure else NonFiniteLogitsError.at(position)
        finish(seq, "cancelled")
    if isinstance(step, Speculate) and kept:
        _count(seq, step, min(kept, len(tokens)))
    elif seq.accepts is not None:
        seq.accepts.pass_by()
    if seq.guide and seq.phase is not Phase.DECODE:
        seq.guide.let_go()
    return result


def give(seq: Sequence, gained: SlotResult, now: float, num_rescored: int | None) -> None:
    """Put what a sequence gained by a step into its outbox, and count it. `num_rescored`: tokens that a screened head
    computed exactly in that step, None if it computed all."""
    if not gained.token_ids:
        return
    if num_rescored is not None:
        seq.screened_steps += 1
        seq.num_rescored += num_rescored
    seq.first_token_at = seq.first_token_at or now
    seq.last_token_at = now
    seq.outbox.append(gained)


def fill_masks(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Fill the masks of the sequences' last steps in flight, where all results before these are applied.

    Returns the sequences whose grammar has failed there; they are finished.
    """
    waiting = [seq for seq in sequences if seq.guide and seq.phase is Phase.DECODE and seq.num_in_flight == 1]
    if waiting:
        fill_masks_of([seq.guide for seq in waiting if seq.guide])
    return [seq for seq in waiting if _has_failed(seq)]


def _has_failed(seq: Sequence) -> bool:
    """Finish a sequence whose grammar has failed, and tell whether it has."""
    if seq.guide is None or seq.guide.failure is None:
        return False
    seq.failure = seq.guide.failure
    finish(seq, "cancelled")
    return True


def _watch(seq: Sequence, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], bool, Guide | None]:
    """Return the tokens up to where the answer has to go on in another way, and the reasons for that.

    The reasons are whether it loops with the last of them, and the guide of a grammar that binds from there on.
    """
    guard, late_form = seq.guard, seq.late_form
    if guard is None and late_form is None:
        return token_ids, False, None
    for number, token in enumerate(token_ids, 1):
        guide, is_kept = (late_form and late_form.push(token)) or (None, True)
        if not is_kept:
            return token_ids[: number - 1], False, guide
        loops = guard is not None and guard.push(token)
        if loops or guide is not None:
            return token_ids[:number], loops, guide
    return token_ids, False, None


def _num_wanted(seq: Sequence, new: tuple[int, ...], loop_end: int) -> int:
    """Return how many of these tokens belong to the sequence, and finish or pause it if they reach its end."""
    request, guide = seq.request, seq.guide
    stops, room = request.stop_token_ids, seq.room
    for number, token in enumerate(new, 1):
        if token in stops or (guide and number == len(new) and guide.is_complete):
            finish(seq, "stop")
        elif number == room and seq.num_wanted == request.max_new_tokens:
            finish(seq, "length")
        elif number == loop_end:
            _end_loop(seq)
        elif number == room:
            seq.phase = Phase.PAUSED
        else:
            continue
        return number
    return len(new)


def _bind(seq: Sequence, guide: Guide) -> None:
    """Pause a sequence to go on under a grammar; finish it if the text so far already completes the grammar."""
    if guide.is_complete:
        finish(seq, "stop")
    elif seq.finish_reason is None:
        seq.guide, seq.late_form, seq.phase = guide, None, Phase.PAUSED


def _end_loop(seq: Sequence) -> None:
    """Pause a sequence that loops, to go on under a higher penalty; finish it if its penalty is that high already."""
    penalty = seq.request.loop_penalty
    if seq.sampling.repetition_penalty >= penalty:
        finish(seq, "loop")
        return
    seq.phase, seq.guard = Phase.PAUSED, LoopGuard(seq.request.loop_repeats)
    seq.sampling = replace(seq.sampling, repetition_penalty=penalty)


def close_thought(seq: Sequence) -> SlotResult:
    """Close the thought of a paused sequence whose budget is used up, and return the closing tokens that it gets.

    They are not sampled, and have the log-probability 0. The sequence is finished if they take its last room, or at the
    first of them that ends an answer.
    """
    thinking, stops = seq.thinking, seq.request.stop_token_ids
    if thinking is None or len(seq.token_ids) < thinking.max_tokens:
        return _NOTHING
    seq.thinking = None
    closing = thinking.closing_ids(seq.token_ids)
    end = next((number for number, token in enumerate(closing, 1) if token in stops), len(closing))
    gained = _forced(seq, closing[:end])
    if gained.token_ids and gained.token_ids[-1] in stops:
        finish(seq, "stop")
    elif not seq.room:
        finish(seq, "length")
    return gained


def readmit(seq: Sequence, limits: ExecutorLimits) -> Admit:
    """Return the step by which the slot of a paused sequence takes it anew, with the answer so far behind its prompt.

    The seed and the positions stay, and so do full pages, except a slot's own, fixed ones, which its release may lose.
    The last token is always prefilled, for the logits behind it. Presence and frequency penalties count from here on.
    """
    text = seq.all_token_ids
    kept = min(seq.num_written, len(text) - 1) // limits.page_size * limits.page_size if seq.pages else 0
    seq.text, seq.phase = text, Phase.PREFILL
    seq.num_prefilled = seq.num_computed = kept
    return _admission(seq, None)


def wait_again(seq: Sequence) -> None:
    """Note that a paused sequence, whose slot is released, waits for one with the answer so far behind its prompt."""
    seq.text = seq.all_token_ids
    seq.phase, seq.slot, seq.num_prefilled, seq.num_computed = Phase.WAITING, -1, 0, 0


def release_pages(seq: Sequence, cache: PrefixCache, *, keeps_answer: bool) -> None:
    """Give back a sequence's pages. The cache knows the prompt's full ones, and with `keeps_answer` the answer's too.

    Steps still in flight write only behind `num_written`, so never to a page that is kept.
    """
    if seq.pages is None:
        return
    if keeps_answer and seq.failure is None:
        text = seq.all_token_ids
        cache.keep(seq.pages, text, min(seq.num_written, len(text)))
    cache.release(seq.pages)
    seq.pages = None


def _forced(seq: Sequence, token_ids: tuple[int, ...]) -> SlotResult:
    """Add tokens that were not sampled, as far as there is room."""
    token_ids = token_ids[: seq.room]
    if seq.guide is not None and token_ids:
        seq.guide.take(token_ids, len(token_ids))
    seq.token_ids.extend(token_ids)
    seq.num_forced = len(token_ids)
    for token in token_ids:
        if seq.guard is not None:
            seq.guard.push(token)
        if seq.late_form is not None:
            seq.late_form.push(token)
    has_logprobs = bool(seq.sampling.logprobs)
    return SlotResult(token_ids, tuple(TokenLogprobs(token, 0.0) for token in token_ids) if has_logprobs else ())


def _count(seq: Sequence, step: Speculate, num_tokens: int) -> None:
    is_last = seq.phase is not Phase.DECODE
    if seq.accepts is not None:
        seq.accepts.add(step.shape, num_tokens, is_last=is_last)
    if seq.policy is not None and not is_last and len(step.slots) == 1:
        is_lookup = seq.repeats is not None and seq.repeats.was_repeated
        seq.policy.observe(step.shape, num_tokens, is_lookup=is_lookup)


def cut(seq: Sequence, num_tokens: int) -> None:
    """Take back the tokens after the first `num_tokens`: all of them are of the last step, or forced behind it."""
    surplus = len(seq.token_ids) - num_tokens - seq.num_forced
    del seq.token_ids[num_tokens:]
    if surplus > 0 and seq.accepts is not None:
        seq.accepts.take_back(surplus)


def finish(seq: Sequence, reason: str) -> None:
    """End the sequence; its slot may be released."""
    seq.phase, seq.finish_reason = Phase.FINISHED, reason
    if seq.guide is not None:
        seq.guide.let_go()
