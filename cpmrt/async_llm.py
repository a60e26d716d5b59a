"""The public entry for programs with an event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from inspect import signature
from threading import Thread
from typing import Any, NoReturn, TypeVar, overload

import numpy as np

from cpmrt.config import SamplingParams
from cpmrt.dtypes import F32
from cpmrt.engine import GenerationStats
from cpmrt.errors import ArgumentError, CpmrtError
from cpmrt.generation import Completion, Piece
from cpmrt.job_maker import Message, Pooling, Prompt, Prompts, Tool, are_conversations, is_batch
from cpmrt.keywords import checks_keywords
from cpmrt.llm import LLM, SAMPLING_HINTS
from cpmrt.sharing.jobs import STOP, WORK, Ended, Generation, Inbox, Job, Reading, completion_of
from cpmrt.sharing.loop_inbox import LoopInbox
from cpmrt.sharing.text_stream import not_copied
from cpmrt.tool_use.tool_choice import ToolChoice

T = TypeVar("T")
_MAKERS = 32
"""The most threads that prepare prompts; with a `prefix_dir` each of them may have to wait for steps of the engine."""
_LLM_HINTS = {name: f"pass it to the LLM: AsyncLLM(LLM({name}=...))" for name in signature(LLM).parameters}


class AsyncLLM:
    """The methods of an LLM, for event loops: they are awaited, and streams are read with `async for`.

    Calls run together as far as the LLM has slots, also beside calls of the LLM itself in other threads. A call whose
    task is cancelled ends its request. Loading blocks, so make the LLM first, or in a thread. `close` closes the LLM
    too.

        >>> async with AsyncLLM(LLM("openbmb/MiniCPM4-0.5B", max_sequences=8)) as llm:
        ...     answers = await asyncio.gather(llm.generate("one"), llm.generate("two"))
        ...     async for piece in llm.stream("three"):
        ...         print(piece.text, end="", flush=True)
    """

    @checks_keywords(_LLM_HINTS)
    def __init__(self, llm: LLM):
        if not isinstance(llm, LLM):
            raise ArgumentError("AsyncLLM", expected="an LLM", actual=type(llm).__name__, fix="AsyncLLM(LLM(model))")
        self._llm, self._inbox = llm, Inbox()
        self._makers = ThreadPoolExecutor(_MAKERS, "cpmrt-prompts")
        self._thread = Thread(target=llm.shared.serve, args=(self._inbox,), name="cpmrt-engine", daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, self._inbox.put, STOP)

    @property
    def llm(self) -> LLM:
        """The LLM itself, for everything that needs no waiting: its plan, config and tokenizer, and `chat_prompt`.

        With a `prefix_dir` `chat_prompt` may wait for steps of the engine: call it in a thread then.
        """
        return self._llm

    @overload
    async def generate(self, prompt: Prompt, params: SamplingParams | None = ...) -> Completion: ...
    @overload
    async def generate(
        self, prompt: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = ...
    ) -> list[Completion]: ...
    @checks_keywords(SAMPLING_HINTS)
    async def generate(
        self, prompt: Prompt | Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion | list[Completion]:
        """Continue a prompt, or several together, as `LLM.generate` does."""
        numbers = self._llm.maker.numbers(prompt if is_batch(prompt) else None, params)
        groups, are_several = await self._make(self._llm.maker.groups, prompt, params, numbers)
        return await self._answers(groups, are_several)

    @checks_keywords(SAMPLING_HINTS)
    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncTextStream:
        """Continue a prompt like `generate`, but return its text piece by piece."""
        numbers = self._llm.maker.numbers(None, params)
        return AsyncTextStream(self, partial(self._llm.maker.only_choice, prompt, params, numbers))

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = ...,
        *,
        tools: Sequence[Tool] | None = ...,
        tool_choice: ToolChoice = ...,
        enable_thinking: bool | None = ...,
        allow_special_tokens: bool = ...,
        template_kwargs: Mapping[str, Any] | None = ...,
    ) -> Completion: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = ...,
        *,
        tools: Sequence[Tool] | None = ...,
        tool_choice: ToolChoice = ...,
        enable_thinking: bool | None = ...,
        allow_special_tokens: bool = ...,
        template_kwargs: Mapping[str, Any] | None = ...,
    ) -> list[Completion]: ...
    @checks_keywords(SAMPLING_HINTS)
    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        enable_thinking: bool | None = None,
        allow_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion | list[Completion]:
        """Answer a conversation, or several together, as `LLM.chat` does."""
        numbers = self._llm.maker.numbers(messages if are_conversations(messages) else None, params)
        groups, are_several = await self._make(
            self._llm.maker.chat_groups,
            messages,
            params,
            tools,
            tool_choice,
            numbers,
            enable_thinking=enable_thinking,
            allow_special_tokens=allow_special_tokens,
            template_kwargs=template_kwargs,
        )
        return await self._answers(groups, are_several)

    @checks_keywords()
    async def logits(self, prompt: Prompt) -> F32:
        """Logits at every position, as `LLM.logits` gives them: float32 [T, V]."""
        return (await self._read(lambda: [self._llm.maker.logits(prompt)]))[0]

    @checks_keywords()
    async def score(self, prompt: Prompt) -> F32:
        """Log-probability of each token after the first, as `LLM.score` gives them: float32 [T - 1]."""
        return (await self._read(lambda: [self._llm.maker.score(prompt)]))[0]

    @checks_keywords()
    async def embed(self, prompt: Prompt | Prompts, *, pooling: Pooling = "mean", normalize: bool = True) -> F32:
        """Embed a text, or several, as `LLM.embed` does: float32 [H] or [N, H]."""
        vectors = await self._read(lambda: self._llm.maker.embed(prompt, pooling, normalize))
        return np.stack(vectors) if is_batch(prompt) else vectors[0]

    async def close(self) -> None:
        """Free everything; calls that still wait raise ClosedError. May be called again."""
        # Closing has a thread of its own: the threads of `_makers` may all be waiting until the LLM is closed, and the
        # program may keep those of asyncio's default executor busy.
        closing = ThreadPoolExecutor(1, "cpmrt-close")
        try:
            await asyncio.get_running_loop().run_in_executor(closing, self._close)
        finally:
            closing.shutdown(wait=False)

    def _close(self) -> None:
        try:
            self._llm.close()
        finally:
            self._stop()
            self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncLLM({self._llm!r})"

    def __reduce__(self) -> NoReturn:
        self._llm.__reduce__()

    async def _make(self, make: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return `make(...)`, computed in a thread of `_makers`. Raises ClosedError after `close` or a fork."""
        self._llm.shared.check_usable()  # a forked process has no such threads: it would wait for ever
        call = partial(copy_context().run, make, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._makers, call)

    async def _read(self, make: Callable[[], list[Reading]]) -> list[F32]:
        readings = await self._make(make)
        await self._run(readings)
        return [reading.result for reading in readings]

    async def _answers(self, groups: list[list[Generation]], are_several: bool) -> Completion | list[Completion]:
        await self._run([job for group in groups for job in group])
        answers = [completion_of(group) for group in groups]
        return answers if are_several else answers[0]

    async def _run(self, jobs: Sequence[Job]) -> None:
        """Run jobs to their ends. Raises the first error of any job, after cancelling the others."""
        inbox = LoopInbox(only_ends=True)
        self._submit(jobs, inbox)
        try:
            for _ in jobs:
                _, end = await inbox.get()
                if isinstance(end, Ended) and end.error is not None:
                    raise end.error
        except BaseException:
            self._llm.shared.cancel(jobs)
            raise

    def _submit(self, jobs: Sequence[Job], inbox: LoopInbox) -> None:
        self._llm.shared.submit(jobs, inbox)
        self._inbox.put(WORK)


class AsyncTextStream(AsyncIterator[Piece]):
    """Iterates over the pieces of one generation with `async for`.

    Several tasks may read it: each piece goes to one of them. The request is cancelled when the stream is closed, when
    its `async with` block is left, when nothing refers to the stream any more and when a task that waits for a piece is
    cancelled. The request begins when somebody first waits for a piece; that wait also raises errors of the prompt.
    """

    def __init__(self, llm: AsyncLLM, make: Callable[[], Generation]):
        self._llm: AsyncLLM | None = llm
        """The AsyncLLM, kept since its engine stops when nothing refers to it any more; None at the end."""
        self._make = make
        self._job: Generation | None = None
        self._reading = asyncio.Lock()

    async def __anext__(self) -> Piece:
        if self._job is not None and self._inbox.loop is not asyncio.get_running_loop():
            raise CpmrtError(
                "the stream was begun in another event loop", fix="read it in that one, or make a stream in each"
            )
        async with self._reading:
            if self._llm is None:
                raise StopAsyncIteration
            try:
                job = self._job or await self._begin(self._llm)
                _, part = await self._inbox.get()
            except BaseException:
                self.close()
                raise
            job.read(part)
            if isinstance(part, Ended):
                self._llm = None
                self._cancel.detach()
                raise part.error or StopAsyncIteration
            return part

    def __reduce__(self) -> NoReturn:
        raise not_copied()

    async def _begin(self, llm: AsyncLLM) -> Generation:
        job, self._inbox = await llm._make(self._make), LoopInbox()
        if self._llm is None:  # closed meanwhile
            raise StopAsyncIteration
        llm._submit((job,), self._inbox)
        self._job = job
        self._cancel = weakref.finalize(self, llm.llm.shared.cancel, (job,))
        self._cancel.atexit = False
        return job

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. May be called again."""
        self._llm = None
        if self._job is not None:
            self._cancel()

    async def aclose(self) -> None:
        """Close the stream, for `contextlib.aclosing` and whatever else takes it for an asynchronous generator."""
        self.close()

    @property
    def completion(self) -> Completion:
        """The answer as far as it has been read; its `finish_reason` is "cancelled" until the end has been read."""
        return self._job.completion if self._job else Completion("", (), "cancelled", (), GenerationStats())
