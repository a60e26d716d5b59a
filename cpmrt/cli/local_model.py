"""A model in this process that answers the conversation of `cpmrt chat`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cpmrt import LLM
from cpmrt.byte_sizes import format_bytes
from cpmrt.cli.context_room import room_for_prompt
from cpmrt.cli.conversation import Conversation, Part
from cpmrt.cli.output import sampling_line
from cpmrt.config import SamplingParams
from cpmrt.errors import ContextLengthError
from cpmrt.generation import Completion
from cpmrt.server.chat_text import ChatText
from cpmrt.server.growing_calls import Delta
from cpmrt.sharing.jobs import Generation
from cpmrt.sharing.text_stream import TextStream
from cpmrt.text.markers import marker_ids
from cpmrt.text.thinking import opened_thought


class LocalModel:
    """Answers a conversation with an LLM in this process. `name` is what the user calls the model."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        enable_thinking: bool | None,
        *,
        allow_special_tokens: bool = False,
        name: str = "the bundled model",
    ):
        self._llm, self._name = llm, name
        self.params, self.enable_thinking = params, enable_thinking
        self._allow_special_tokens = allow_special_tokens

    def check(self, conversation: Conversation) -> None:
        """Raise RequestError if the model cannot chat at all, or not with this system message."""
        self._prompt(conversation.asked("?"))

    def describe(self) -> list[str]:
        """Return two lines: name, device, context and memory of the model, and how answers are sampled."""
        device = getattr(self._llm.executor, "device", None)
        where = device.name if device is not None else "the CPU (NumPy)"
        memory = format_bytes(self._llm.plan.total_bytes)
        model = f"{self._name} on {where}, context {self._llm.max_context:,} tokens, memory {memory}"
        return [model, f"sampling: {sampling_line(self.params, self._llm.sampling_defaults)}"]

    def usage(self, conversation: Conversation) -> str:
        """Return how many tokens of the context the conversation takes."""
        messages, most = conversation.messages(), self._llm.max_context
        try:
            return f"context: {len(self._prompt(messages)) if messages else 0:,} of {most:,} tokens"
        except ContextLengthError:
            return f"context: full ({most:,} tokens)"

    def open(self, conversation: Conversation, question: str) -> tuple[LocalAnswer, int]:
        """Begin the answer to one more question; also return how many of the oldest turns had to be left out."""
        prompt, num_dropped = self.fit(conversation, question)
        thought_end = opened_thought(self._llm.tokenizer, prompt)
        job = Generation(self._llm.request(prompt, self.params), marker_ids(self._llm.tokenizer))
        # Only here: a prompt that is measured is no question.
        self._llm.maker.note_chat(prompt, conversation.asked(question, skip=num_dropped), self._prompt)
        return LocalAnswer(TextStream(self._llm.shared, job), thought_end, self._llm.prepare_next_turn), num_dropped

    def fit(self, conversation: Conversation, question: str) -> tuple[list[int], int]:
        """Return the prompt for one more question, and how many of the oldest turns were left out to make it fit.

        A prompt that leaves too little room for an answer even without any turns is returned all the same:
        `LLM.stream` refuses it and names the figures. Raises ContextLengthError if it exceeds the context by itself.
        """
        context = self._llm.max_context
        # The LLM refuses a prompt unless all of `max_new_tokens` fits behind it.
        most = self.params.max_new_tokens
        room = room_for_prompt(context, None) if most is None else context - most
        for skip in range(conversation.num_turns):
            with suppress(ContextLengthError):
                ids = self._prompt(conversation.asked(question, skip=skip))
                if len(ids) <= room:
                    return ids, skip
        return self._prompt(conversation.asked(question, skip=conversation.num_turns)), conversation.num_turns

    def _prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        tokens_of = self._llm.maker.chat_renderer(
            enable_thinking=self.enable_thinking, allow_special_tokens=self._allow_special_tokens
        )
        return tokens_of(messages)


class LocalAnswer:
    """An answer of an LLM, split into thoughts and text.

    `prepare` is called after an answer that was read to its end, when its `with` block is left.
    """

    def __init__(self, stream: TextStream, thought_end: str | None, prepare: Callable[[], None]):
        self._stream, self._splitter, self._prepare = stream, ChatText(thought_end, None), prepare
        self._texts, self._is_over = list[str](), False

    def __iter__(self) -> Iterator[Part]:
        for piece in self._stream:
            yield from list(self._parts(self._splitter.push(piece.text))) or [Part("")]  # the caller may want to stop
        yield from self._parts(self._splitter.flush())
        self._is_over = True

    def __enter__(self) -> LocalAnswer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()
        if self._is_over:
            self._prepare()

    @property
    def text(self) -> str:
        """The text that has come so far, without the thoughts."""
        return "".join(self._texts)

    @property
    def completion(self) -> Completion:
        """The completion so far, its text with the thoughts."""
        return self._stream.completion

    def _parts(self, deltas: list[Delta]) -> Iterator[Part]:
        for delta in deltas:
            if thought := delta.get("reasoning_content"):
                yield Part(thought, is_thought=True)
            if text := delta.get("content"):
                self._texts.append(text)
                yield Part(text)
