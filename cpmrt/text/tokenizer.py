"""The tokenizer of a checkpoint: Hugging Face `tokenizer.json`, run by the `tokenizers` library.

The files beside it (`special_tokens`) say whether a prompt starts with BOS, which token ends a turn, and add tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from cpmrt.errors import CheckpointError, RequestError, quoted
from cpmrt.text.control_tokens import ControlTokens
from cpmrt.text.encoding import PromptLimit, encode_freely, largest_id, longest_token
from cpmrt.text.marks import MarkedText, Marks
from cpmrt.text.special_tokens import CONFIG_FILE, complete_added_tokens, read_optional, read_special_tokens
from cpmrt.text.token_bytes import TokenBytes
from cpmrt.text.tokenizer_check import check_tokenizer
from cpmrt.weights.files import parse_object
from cpmrt.weights.model_files import is_there, read_file

MAX_TOKENIZER_BYTES = 64 * 2**20

MAKE_TOKENIZER = (
    "pip install transformers sentencepiece protobuf && "
    "python -c \"from transformers import LlamaTokenizerFast as T; T.from_pretrained('.').save_pretrained('.')\""
)
"""The command that makes tokenizer.json of a SentencePiece model (AutoTokenizer makes one with other ids)."""

T = TypeVar("T")


class Tokenizer:
    """Turns text into token ids and back. Made by `Tokenizer.open`.

    `bos_token_id` is None and `eos_token_ids` empty where the tokenizer's files name none; the model's own end
    tokens (config.json, generation_config.json) are not among them. `vocab_size` counts all tokens, added ones
    included; it may differ from the rows of the model's embedding. `longest_token` is the most bytes of a token,
    `largest_id` the largest id of one that is not added.
    """

    def __init__(
        self, library: Any, folder: Path, *, longest_token: int, largest_id: int, vocab_size: int | None = None
    ):
        self._library, self._folder, self._longest_token = library, folder, longest_token
        self._file = str(folder / "tokenizer.json")
        names = read_special_tokens(folder)
        self.bos_token_id = self._named(names.get("bos_token"), "bos_token")
        eos_token_id = self._named(names.get("eos_token"), "eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos_token_id is None else (eos_token_id,)
        added = library.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = library.get_vocab_size()
        self._rows = vocab_size if vocab_size is not None and max(largest_id, *added, -1) >= vocab_size else None
        """The rows of the model's embedding if a token has none there. Else None: no prompt is searched for one, as
        that keeps other threads waiting, 3 ms for 100,000 tokens."""
        self._add_bos = read_optional(folder / CONFIG_FILE).get("add_bos_token")
        if self._add_bos is not None and not isinstance(self._add_bos, bool):
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: add_bos_token", expected="true or false", actual=quoted(self._add_bos)
            )
        if self._add_bos and self.bos_token_id is None:
            raise CheckpointError(f"{folder / CONFIG_FILE}: add_bos_token is true but bos_token is not set")
        self.control_tokens = ControlTokens(library)
        self._bytes = self._run("be decoded", lambda: TokenBytes(library))

    @classmethod
    def open(cls, folder: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Open the tokenizer in a checkpoint folder; `vocab_size` is the number of rows of the model's embedding.

        A tokenizer may know more tokens than the model has rows (or fewer: rows are often padded); only a prompt
        that needs such a token is refused, by `encode`. Raises CheckpointError if a file is missing or malformed,
        or if two files give a token different ids.
        """
        path = folder / "tokenizer.json"
        if not is_there(path):
            raise _missing(folder)
        raw = read_file(path, MAX_TOKENIZER_BYTES)
        content = parse_object(raw, str(path), unique_keys=True)
        check_tokenizer(content, str(path))
        library = _guarded(f"{path} cannot be read", lambda: _load(raw))
        _guarded(f"{path} does not fit the files beside it", lambda: complete_added_tokens(library, folder, content))
        return cls(
            library, folder, longest_token=longest_token(content), largest_id=largest_id(content), vocab_size=vocab_size
        )

    @classmethod
    def open_if_there(cls, folder: Path, *, vocab_size: int | None = None) -> Tokenizer | None:
        """Open the tokenizer in a folder as `open` does; None if it has none."""
        return cls.open(folder, vocab_size=vocab_size) if is_there(folder / "tokenizer.json") else None

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text; special tokens written in it are read as such.

        With `add_special_tokens`, BOS is put in front if tokenizer_config.json has add_bos_token true, or has no
        such key and the post-processor of tokenizer.json puts it there; but not if the text already begins with it.
        Raises RequestError on text that is not valid Unicode or needs a token the model has no embedding for,
        ContextLengthError on more than `max_tokens`; a text that is clearly too long is not even encoded.
        """
        return self._encoded(text, partial(encode_freely, self._library, text), add_special_tokens, max_tokens)

    def encode_marked(self, prompt: MarkedText, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a rendered chat as `encode` does, but take special tokens in marked text as plain.

        Raises RequestError and ContextLengthError like `encode`.
        """
        return self._encoded(prompt.plain, partial(self.control_tokens.encode, prompt), True, max_tokens)

    def encode_plain(self, text: str, *, but: Collection[str] = ()) -> list[int]:
        """Return the token ids of a text without BOS; its special tokens, except those of `but`, are plain text.

        Raises RequestError like `encode`.
        """
        marks = Marks(self.control_tokens.texts, text)
        prompt = MarkedText(marks.put_on_tokens(text, but=but), marks)
        return self._encoded(text, partial(self.control_tokens.encode, prompt), False, None)

    def _encoded(
        self, text: str, encode: Callable[[], Any], add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        if not isinstance(text, str):
            raise RequestError("text to encode", expected="a str", actual=type(text).__name__)
        limit = None if max_tokens is None else PromptLimit(max_tokens, self._longest_token)
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text to encode is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}"
            ) from error
        if limit is not None:
            limit.check_bytes(num_bytes)
        plain = self._run("encode", encode)
        if limit is not None:
            limit.check_tokens(len(plain))
        ids = self._run("encode", lambda: self._completed(plain, add_special_tokens))
        if self._rows is not None and ids and max(ids) >= self._rows:
            raise RequestError(
                f"text to encode has token {quoted(self._library.id_to_token(max(ids)))}, which the model lacks",
                expected=f"token ids below its vocab_size {self._rows}",
                actual=max(ids),
            )
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids without a token (padding rows of the model) add nothing.

        The result equals that of the `tokenizers` library on valid UTF-8. Otherwise only the invalid bytes become
        U+FFFD, as in SentencePiece; the library replaces the valid characters next to them too.
        Raises RequestError on anything that is not a token id.
        """
        wanted = [_checked(token_id) for token_id in ids]
        if skip_special_tokens:
            wanted = [token_id for token_id in wanted if token_id not in self.special_ids]
        return self._run("decode", lambda: self._bytes.join(wanted)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return the bytes that one token adds to a text, b"" for special tokens; `first`: it is the first of the text.

        Raises RequestError on anything that is not a token id.
        """
        if _checked(token_id) in self.special_ids:
            return b""
        known = None if first else self._bytes.known.get(token_id)
        if known is not None:
            return known
        ask = self._bytes.first if first else self._bytes.inner
        return self._run("decode", lambda: ask(token_id))

    def written_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token as it is written out, a special one too; b"" for an id without a token."""
        return self._run("decode", lambda: self._bytes.inner(_checked(token_id)))

    def serialized(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json, with every token that was added."""
        return str(self._library.to_str())

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, None if there is none."""
        found = self._run("look up", lambda: self._library.token_to_id(text))
        return None if found is None else int(found)

    def _completed(self, plain: Any, add_special_tokens: bool) -> list[int]:
        """Return the ids of an encoding, with BOS in front where the checkpoint wants it."""
        plain_ids: list[int] = plain.ids
        if not add_special_tokens:
            return plain_ids
        front, back = self._added_ids
        ids, bos, add_bos = [*front, *plain_ids, *back], self.bos_token_id, self._add_bos
        if front and ids[:1] == plain_ids[:1]:
            return ids[1:]  # the text itself begins with that token
        if front and ids[0] == bos:
            return ids[1:] if add_bos is False else ids
        return [bos, *ids] if add_bos and bos is not None and plain_ids[:1] != [bos] else ids

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the post-processor puts before every text, and those that it puts after it."""
        plain = self._library.encode("a", add_special_tokens=False)
        full = self._library.post_process(plain, None, True)
        ids = list(full.ids)
        num_front = full.special_tokens_mask.index(0) if plain.ids else len(ids)
        return ids[:num_front], ids[num_front + len(plain.ids) :]

    def _named(self, text: object, name: str) -> int | None:
        token_id = self.token_id(text) if isinstance(text, str) else None
        if text is not None and token_id is None:
            raise CheckpointError(
                f"{self._folder}: {name} {quoted(text)} is not a token of tokenizer.json",
                fix="take tokenizer.json and tokenizer_config.json from the same checkpoint",
            )
        return token_id

    def _run(self, action: str, call: Callable[[], T]) -> T:
        return _guarded(f"{self._file} cannot {action}", call)


def _load(raw: bytes) -> Any:
    from tokenizers import Tokenizer as Library  # imported here: `import cpmrt` stays light

    library = Library.from_buffer(raw)
    library.no_truncation()
    library.no_padding()
    return library


def _guarded(what: str, call: Callable[[], T]) -> T:
    """Call the Rust library and return the result; its errors, plain Exceptions or panics, become CheckpointErrors."""
    try:
        return call()
    except (CheckpointError, RequestError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{what}: {str(error)[:300]}", fix="check that the file is complete (compare it with its source)"
        ) from error


def _missing(folder: Path) -> CheckpointError:
    if (folder / "tokenizer.model").exists():
        return CheckpointError(
            f"{folder} has a tokenizer.model but no tokenizer.json",
            fix=f"copy tokenizer.json from the model's repository, or make it in this folder: {MAKE_TOKENIZER}",
        )
    return CheckpointError(f"{folder} has no tokenizer.json", fix="copy it from the model's repository")


def _checked(token_id: int) -> int:
    if not isinstance(token_id, int):
        try:
            token_id = int(token_id.__index__())
        except (AttributeError, TypeError) as error:
            raise RequestError("token id", expected="an integer", actual=quoted(token_id)) from error
    if not 0 <= token_id < 2**32:
        raise RequestError("token id", expected="an integer in [0, 2**32)", actual=token_id)
    return token_id
