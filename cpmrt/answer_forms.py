"""Gives answers the form that a request asks for, and binds calls of tools to the tools' schemas.

Few requests need this module, and it takes long to import: `job_maker` imports it for the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cpmrt.config import SamplingParams
from cpmrt.errors import RequestError
from cpmrt.grammar import Grammars, Thought
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.text.thinking import opened_thought, opening_tokens
from cpmrt.tool_use.blame import blamed, check_schemas
from cpmrt.tool_use.calls import schemas_of
from cpmrt.tool_use.grammars import format_of, grammar_of


@dataclass
class AnswerForms:
    """The forms of one model's answers, in its tokens. Any thread may use it."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    end_token_ids: tuple[int, ...]

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of the forms that requests give their answers."""
        return Grammars(self.tokenizer, self.end_token_ids)

    def request_fields(self, prompt_ids: tuple[int, ...], params: SamplingParams, num_begun: int) -> dict[str, Any]:
        """Return the fields of a request that give its answer the form of `params`, which have one."""
        form = params.form
        assert form is not None, "settings without a form"
        closing = opened_thought(self.tokenizer, prompt_ids, num_begun)
        end = (closing or "").encode()
        if form.trigger:
            return {"trigger": self.grammars.trigger(form, end)}
        may_think = params.max_thinking_tokens is not None and closing is None
        thought = Thought(end, opening_tokens(self.tokenizer) if may_think else ())
        return {"matcher": self.grammars.matcher(form, thought)}

    def calling(
        self, params: SamplingParams, tools: Sequence[Mapping[str, Any]], names: Sequence[str], *, one_call: bool,
        is_free: bool,
    ) -> SamplingParams:  # fmt: skip
        """Return settings with a compiled grammar of calls of the tools of these names, or of all if there are none.

        With `is_free` it applies from the start of a call on. Raises RequestError.
        """
        schemas = schemas_of(tools, names)
        form = format_of(self.chat_template)
        check_schemas(tools, schemas, form)
        grammar = grammar_of(form, schemas, self.tokenizer, one_call=one_call, instead=params.json_schema)
        trigger = form.start if is_free else None
        try:
            bound = replace(params, json_schema=None, grammar=grammar, grammar_trigger=trigger)
            assert bound.form is not None
            (self.grammars.trigger if is_free else self.grammars.matcher)(bound.form)
        except RequestError as refusal:
            raise blamed(refusal, grammar, tools, tuple(schemas)) from None
        return bound
