"""Errors for unknown keyword arguments, which name the nearest known one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any, ParamSpec, TypeVar, cast

from cpmrt.errors import ArgumentError, listed, quoted

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")

ELSEWHERE = {
    "best_of": "n",
    "context_length": "max_context",
    "ctx_size": "max_context",
    "device": "executor",
    "draft_model": "draft",
    "enable_prefix_caching": "prefix_cache",
    "eos_token_id": "stop_token_ids",
    "gpu_memory_utilization": "memory_budget",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_model_len": "max_context",
    "max_num_batched_tokens": "prefill_chunk",
    "max_num_seqs": "max_sequences",
    "max_tokens": "max_new_tokens",
    "n_batch": "prefill_chunk",
    "n_ctx": "max_context",
    "n_predict": "max_new_tokens",
    "num_ctx": "max_context",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "sampling_params": "params",
    "speculative_model": "draft",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "torch_dtype": "dtype",
}
"""Names of arguments in other programs -> the names of the same arguments here, on the command line with dashes."""
_ADVICE = {
    "allowed_token_ids": "pass choices=, regex= or grammar=",
    "cache_dir": "set HF_HOME",
    "do_sample": "temperature=0 is greedy, any other samples",
    "length_penalty": "leave it out: there is no beam search",
    "min_new_tokens": "leave it out, or pass ignore_eos=True for an answer of max_new_tokens",
    "min_tokens": "leave it out, or pass ignore_eos=True for an answer of max_new_tokens",
    "n_gpu_layers": "leave it out: all layers are on the GPU",
    "params": "pass it to generate, stream or chat",
    "prompt_logprobs": "use llm.score(prompt)",
    "response_format": "pass json_schema=, regex=, grammar= or choices=",
    "structured_outputs": "pass json_schema=, regex=, grammar= or choices=",
    "tensor_parallel_size": "leave it out: an LLM uses one GPU; start a process for each",
    "trust_remote_code": "leave it out: no code that comes with a model is run",
}
"""What to do about arguments of other programs that have none like them here."""


def checks_keywords(hints: Mapping[str, str] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function raises ArgumentError for an unknown keyword, naming the nearest known one.

    `hints` has advice for further names, such as those of arguments that belong elsewhere.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = inspect.signature(function).parameters.keys() - {"self"}

        def check(names: Set[str]) -> None:
            if not names <= known:
                name = function.__qualname__.removesuffix(".__init__")
                raise _unknown(name, min(names - known), known, hints or {})

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            check(kwargs.keys())
            return function(*args, **kwargs)

        @functools.wraps(function)
        async def checked_in_task(*args: P.args, **kwargs: P.kwargs) -> Any:
            check(kwargs.keys())
            return await cast(Awaitable[Any], function(*args, **kwargs))

        # Mocks and frameworks ask whether a function is to be awaited.
        return cast(Callable[P, T], checked_in_task) if inspect.iscoroutinefunction(function) else checked

    return decorate


def checks_fields(cls: type[C]) -> type[C]:
    """Have a dataclass raise ArgumentError for an unknown field, as `checks_keywords` does."""
    setattr(cls, "__init__", checks_keywords()(cls.__init__))  # noqa: B010 - a checker lets nobody assign it
    return cls


def _unknown(function: str, name: str, known: Set[str], hints: Mapping[str, str]) -> ArgumentError:
    what, meant = f"{function}: there is no argument {quoted(name)}", ELSEWHERE.get(name)
    if hint := hints.get(name) or hints.get(meant or ""):
        return ArgumentError(what, fix=hint)
    if meant not in known and (advice := _ADVICE.get(meant or name)):
        return ArgumentError(what, fix=advice)
    from difflib import get_close_matches  # it takes long, and only a mistake needs it

    near = [meant] if meant in known else get_close_matches(name, sorted(known), 1)
    if near:
        return ArgumentError(what, fix=f"did you mean {near[0]}?")
    return ArgumentError(what, expected=listed(sorted(known), 30))
