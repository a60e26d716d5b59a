"""What a checkpoint folder says of its special tokens, for the tokenizer and for the chat template.

Format: Hugging Face `tokenizer_config.json` and the older `special_tokens_map.json`; a token is a string or an
object with the string under "content".
"""

from __future__ import annotations

from pathlib import Path

from cpmrt.errors import CheckpointError, quoted
from cpmrt.weights.files import read_json

CONFIG_FILE = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_optional(path: Path) -> dict[str, object]:
    """The JSON object in a file that a checkpoint may lack; {} if it does. Raises CheckpointError on any defect."""
    return read_json(path) if path.exists() else {}


def read_special_tokens(folder: Path) -> dict[str, str | list[str]]:
    """The special tokens by name, those of NAMES as strings and `additional_special_tokens` as a list.

    tokenizer_config.json wins over special_tokens_map.json; a token that is null in both is left out.
    Raises CheckpointError on malformed files.
    """
    found: dict[str, str | list[str]] = {}
    for file in (CONFIG_FILE, "special_tokens_map.json"):
        values = read_optional(folder / file)
        for name in NAMES:
            if name not in found and values.get(name) is not None:
                found[name] = token_text(values[name], folder / file, name)
        name = "additional_special_tokens"
        listed = values.get(name)
        if name not in found and listed is not None:
            if not isinstance(listed, list):
                raise CheckpointError(f"{folder / file}: {name}", expected="a list", actual=quoted(listed))
            found[name] = [token_text(value, folder / file, name) for value in listed]
    return found


def token_text(value: object, path: Path, name: str) -> str:
    """The string of a token in either spelling. Raises CheckpointError naming the file and the key."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{path}: {name}", expected="a token: a string, or its content", actual=quoted(value))
    return text
