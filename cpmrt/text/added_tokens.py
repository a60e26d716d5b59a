"""Tokens that stand beside the vocabulary of `tokenizer.json`: checked, and completed from the files next to it.

`tokenizer_config.json` lists them under `added_tokens_decoder` (id -> token and flags), the older
`added_tokens.json` as text -> id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpmrt.errors import CheckpointError, quoted
from cpmrt.text.special_tokens import CONFIG_FILE, read_optional, read_special_tokens, token_text

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class _Added:
    token_id: int
    content: str
    flags: dict[str, bool]
    source: Path


def complete_added_tokens(library: Any, folder: Path, tokenizer_json: dict[str, object]) -> None:
    """Add to a `tokenizers.Tokenizer` the tokens that only the files beside tokenizer.json name.

    `tokenizer_json` is the content of that file. Raises CheckpointError if a file is malformed or gives a token
    another id than the library does.
    """
    from tokenizers import AddedToken

    own = _listed(tokenizer_json.get("added_tokens"), folder / "tokenizer.json")
    tokens = [*own, *_from_config(folder), *_from_added_tokens_json(folder)]
    known = {added.content for added in library.get_added_tokens_decoder().values()}
    missing = {token.content: token for token in reversed(tokens) if token.content not in known}
    in_order = sorted(missing.values(), key=lambda token: token.token_id)
    library.add_tokens([AddedToken(token.content, **token.flags) for token in in_order])
    for token in tokens:
        actual = library.token_to_id(token.content)
        if actual != token.token_id:
            raise CheckpointError(
                f"{token.source}: added token {quoted(token.content)}",
                expected=f"the id {actual} that it has in tokenizer.json",
                actual=token.token_id,
                fix="take all tokenizer files from the same checkpoint",
            )
    known |= set(missing)
    named = [[text] if isinstance(text, str) else text for text in read_special_tokens(folder).values()]
    texts = [text for group in named for text in group]
    library.add_special_tokens([t for t in texts if t not in known and library.token_to_id(t) is not None])


def _from_config(folder: Path) -> Iterator[_Added]:
    path, name = folder / CONFIG_FILE, "added_tokens_decoder"
    decoder = read_optional(path).get(name)
    if decoder is None:
        return
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{path}: {name}", expected="an object", actual=quoted(decoder))
    for key, value in decoder.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise CheckpointError(f"{path}: {name}", expected="token ids as keys", actual=quoted(key))
        yield _Added(int(key), token_text(value, path, f"{name}.{key}"), _flags(value), path)


def _from_added_tokens_json(folder: Path) -> Iterator[_Added]:
    path = folder / "added_tokens.json"
    for text, token_id in read_optional(path).items():
        if not isinstance(token_id, int) or not text:
            raise CheckpointError(f"{path}: {quoted(text)}", expected="a token and its id", actual=quoted(token_id))
        yield _Added(token_id, text, {}, path)


def _listed(tokens: object, path: Path) -> Iterator[_Added]:
    """The list in tokenizer.json; the library has validated it, but renumbers ids that leave a gap."""
    for value in tokens if isinstance(tokens, list) else []:
        if isinstance(value, dict) and isinstance(value.get("id"), int):
            yield _Added(value["id"], token_text(value, path, "added_tokens"), _flags(value), path)


def _flags(value: object) -> dict[str, bool]:
    flags = value if isinstance(value, dict) else {}
    return {name: flags[name] for name in _FLAGS if isinstance(flags.get(name), bool)}
