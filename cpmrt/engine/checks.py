"""Checks of a request before it becomes a sequence, and the guide or late form of its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt.engine.guide import Guide, Matcher
from cpmrt.engine.late_form import LateForm
from cpmrt.engine.sequence import Request
from cpmrt.errors import SHORTEN_PROMPT, ContextLengthError, RequestError
from cpmrt.executor import MAX_CERTAIN, ExecutorLimits


def check_prompt(token_ids: Sequence[int], max_context: int) -> None:
    """Raise RequestError for a prompt without tokens, ContextLengthError for one that alone exceeds the context."""
    _check_some(token_ids)
    if len(token_ids) > max_context:
        raise ContextLengthError.of("the prompt", max_context, len(token_ids))


def check_request(request: Request, limits: ExecutorLimits) -> None:
    """Raise ContextLengthError if prompt and new tokens exceed the context, RequestError for an empty prompt, more
    biases than the executor takes, or a grammar where it takes none."""
    prompt, new, limit = len(request.prompt_ids), request.max_new_tokens, limits.max_context
    _check_some(request.prompt_ids)
    if prompt + new > limit:
        room = limit - prompt
        fix = f"ask for at most {room} new tokens" if room > 0 else SHORTEN_PROMPT
        raise ContextLengthError.of("the request", limit, f"{prompt} prompt + {new} new", fix=fix)
    if len(request.sampling.logit_bias) > limits.max_logit_bias:
        raise RequestError(
            "SamplingParams.logit_bias is more than this executor takes",
            expected=f"at most {limits.max_logit_bias} tokens",
            actual=len(request.sampling.logit_bias),
        )
    if (request.matcher or request.trigger) and not limits.takes_masks:
        raise RequestError("this executor takes no schemas and grammars", fix="use executor='reference'")


def guide_of(request: Request, limits: ExecutorLimits) -> Guide | None:
    """Return the guide that leads an answer through the request's grammar; None: there is no grammar."""
    return None if request.matcher is None else _guide(request.matcher(), request, limits)


def late_form_of(request: Request, limits: ExecutorLimits) -> LateForm | None:
    """Return the late form, which finds where the request's grammar begins to bind; None: the request has no trigger.
    """
    if request.trigger is None:
        return None
    return LateForm(request.trigger(), lambda matcher: _guide(matcher, request, limits))


def _check_some(token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty", expected="at least one token", actual=0)


def _guide(matcher: Matcher, request: Request, limits: ExecutorLimits) -> Guide:
    # Certain tokens are not sampled, so they have no log-probabilities: a request that wants these samples every token.
    max_run = MAX_CERTAIN if limits.certain_rows and not request.sampling.logprobs else 0
    return Guide(matcher, max_run, request.stop_token_ids)
