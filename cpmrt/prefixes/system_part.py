"""The part of a chat's prompt that its system messages and tools make, and that other chats may begin with too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from cpmrt.text.messages import SYSTEM_ROLES

Message = Mapping[str, Any]
TokensOf = Callable[[Sequence[Message]], Sequence[int]]


def system_part(token_ids: Sequence[int], messages: Sequence[Message], tokens_of: TokensOf) -> tuple[int, ...]:
    """Return the first tokens that a chat shares with one of the same system messages and another question.

    `tokens_of` renders messages as the chat's own were rendered.
    """
    leading = list(takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages))
    other = tokens_of([*leading, {"role": "user", "content": "?"}])
    pairs = zip(token_ids, other, strict=False)
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
