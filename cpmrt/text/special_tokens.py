"""Reads the special tokens of a checkpoint folder, and the tokens that files beside `tokenizer.json` add to it.

Formats: Hugging Face `tokenizer_config.json` and the older `special_tokens_map.json`, where a token is a string or an
object with the string under "content". Added tokens stand in `tokenizer_config.json` under `added_tokens_decoder`
(id -> token and flags), or in the older `added_tokens.json` (text -> id).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights.model_files import read_json_if_there

CONFIG_FILE = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_optional(path: Path) -> dict[str, object]:
    """Return the JSON object in a file, or {} if the checkpoint lacks it. Raises CheckpointError on any defect."""
    return read_json_if_there(path) or {}


def read_special_tokens(folder: Path) -> dict[str, str | list[str]]:
    """Return the special tokens by name: those of NAMES as strings, and `additional_special_tokens` as a list.

    tokenizer_config.json wins over special_tokens_map.json; a token that is null or "" in both is left out.
    Raises CheckpointError on malformed files.
    """
    found: dict[str, str | list[str]] = {}
    for file in (CONFIG_FILE, "special_tokens_map.json"):
        values = read_optional(folder / file)
        for name in NAMES:
            if name not in found and values.get(name) not in (None, ""):
                found[name] = token_text(values[name], folder / file, name)
        name = "additional_special_tokens"
        listed = values.get(name)
        if name not in found and listed is not None:
            if not isinstance(listed, list):
                raise CheckpointError(f"{folder / file}: {name}", expected="a list", actual=quoted(listed))
            found[name] = [token_text(value, folder / file, name) for value in listed]
    return found


def token_text(value: object, path: Path, name: str) -> str:
    """Return the string of a token in either spelling. Raises CheckpointError naming the file and the key."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{path}: {name}", expected="a token: a string, or its content", actual=quoted(value))
    return text


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
    """Yield the added tokens of tokenizer.json. The library has validated the list, but renumbers ids after a gap."""
    for value in tokens if isinstance(tokens, list) else []:
        if isinstance(value, dict) and isinstance(value.get("id"), int):
            yield _Added(value["id"], token_text(value, path, "added_tokens"), _flags(value), path)


def _flags(value: object) -> dict[str, bool]:
    flags = value if isinstance(value, dict) else {}
    return {name: flags[name] for name in _FLAGS if isinstance(flags.get(name), bool)}
