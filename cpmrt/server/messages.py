"""POST /v1/messages and /v1/messages/count_tokens: conversations in the format of Anthropic's API."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from cpmrt import LLM
from cpmrt.job_maker import TokensOf
from cpmrt.server.chat_text import ChatText
from cpmrt.server.errors import naming
from cpmrt.server.messages_answer import MessagesFormat
from cpmrt.server.messages_request import TOOL_NAMES, Conversation, read_conversation, read_settings
from cpmrt.server.service import Prepared, Service, bound_format, calling, check_tools, choices_of
from cpmrt.server.tokenizing import needed
from cpmrt.text.markers import ANSWER_MARKERS, marker_ids
from cpmrt.text.thinking import opened_thought
from cpmrt.tool_use.calls import schemas_of


def prepare_message(service: Service, body: dict[str, Any]) -> Prepared:
    """Check a conversation, render and tokenize it. Raises ApiError, CpmrtError."""
    llm, settings = service.engine.llm, service.settings
    conversation = read_conversation(body, settings.model_names)
    ids, num_begun = _prompt_ids(llm, conversation, llm.maker.chat_reader)
    with naming(TOOL_NAMES):
        wanted = calling(
            llm, read_settings(body), conversation.tools, conversation.called, one_call=conversation.one_call
        )  # fmt: skip
    schemas = schemas_of(conversation.tools) if conversation.tools else None
    text = ChatText(
        opened_thought(llm.tokenizer, ids, num_begun), schemas, one_call=conversation.one_call,
        bound=bound_format(llm, wanted, conversation.called), calls_only=bool(conversation.called),
        objects_only=True, grows=False,
    )  # fmt: skip
    message_id = f"msg_{secrets.token_hex(12)}"
    answer = MessagesFormat(message_id, settings.model_name, text, len(ids))
    requests = choices_of(llm, ids, wanted, num_begun=num_begun)
    return Prepared(message_id, requests, wanted, answer, marker_ids(llm.tokenizer))


def count_tokens(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    """Return how many tokens a conversation takes. Raises ApiError, CpmrtError."""
    conversation, llm = read_conversation(body, service.settings.model_names), service.engine.llm
    ids, _ = _prompt_ids(llm, conversation, llm.maker.chat_renderer)
    return {"input_tokens": len(ids)}


def _prompt_ids(llm: LLM, conversation: Conversation, tokens_by: Callable[..., TokensOf]) -> tuple[list[int], int]:
    """Return the prompt's token ids, and how many of the last ones begin the answer, as the last message says.

    `tokens_by`: `JobMaker.chat_reader` for a prompt that is to be answered, else `chat_renderer`.
    """
    check_tools(llm, conversation.tools, conversation.called)
    tokens_of = tokens_by(tools=conversation.tools or None, enable_thinking=conversation.thinks)
    ids = tokens_of(conversation.messages)
    begun = conversation.begun and needed(llm.tokenizer).encode_plain(conversation.begun, but=ANSWER_MARKERS)
    return [*ids, *begun], len(begun)
