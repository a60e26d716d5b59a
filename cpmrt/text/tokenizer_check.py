"""Checks what a tokenizer.json may contain before the `tokenizers` library loads it.

The library trusts the file: a normalizer may make gigabytes of a short text, which ends the process when memory runs
out, and it panics on contents that it does not expect. So components, sizes and regular expressions are bounded here.
The bounds are far beyond what tokenizers of models need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cpmrt.errors import CheckpointError, quoted
from cpmrt.text.charsmap_check import longest_replacement
from cpmrt.text.regex_check import UnsafeRegexError, check_regex

MAX_GROWTH = 256
"""The most times that a text may grow, in bytes, by all normalizers and pre-tokenizers together, or by all decoders."""
MAX_STRING_BYTES = 256
"""The longest string that a component may put into a text."""
MAX_COMPONENTS = 64
MAX_DEPTH = 8
MAX_TOKEN_CHARACTERS = 16384
MAX_TEMPLATE_PIECES = 64
MAX_TEXT_COPIES = 4
"""The most times that a post-processor may repeat the tokens of a text."""

Component = Mapping[str, Any]
Growth = Callable[[Component, "_Place"], float]


class _Place:
    """Checks the components of one section of a tokenizer.json.

    `source` names the section in messages, `kinds` are the types that a component may have there, each with its check,
    and `parts` is the key under which a Sequence lists its components.
    """

    def __init__(self, source: str, kinds: Mapping[str, Growth], parts: str):
        self.source, self._kinds, self._parts, self._count = source, kinds, parts, 0
        self._num_templates = 0

    def growth(self, value: object, depth: int = 0) -> float:
        """Check a component, which may be null or a Sequence; return how many times as long it may make a text."""
        if value is None:
            return 1.0
        kind = value.get("type") if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in self._kinds:
            raise self.refuse("type of a component", " | ".join(self._kinds), kind)
        self._count += 1
        if self._count > MAX_COMPONENTS or depth > MAX_DEPTH:
            raise CheckpointError(
                f"{self.source}: components", expected=f"at most {MAX_COMPONENTS}, nested {MAX_DEPTH} deep"
            )
        if kind != "Sequence":
            return self._kinds[kind](value, self)
        parts = value.get(self._parts)
        if not isinstance(parts, list):
            raise self.refuse(self._parts, "a list", parts)
        product = 1.0
        for part in parts:
            product *= self.growth(part, depth + 1)
        return product

    def count_template(self) -> None:
        """Raise CheckpointError on a second component that adds special tokens: the library takes only one."""
        self._num_templates += 1
        if self._num_templates > 1:
            raise self.refuse("processors that add special tokens", "one", self._num_templates)

    def string(self, component: Component, name: str) -> str:
        """Return a string of a component, "" if it is null or absent. Raises CheckpointError above MAX_STRING_BYTES."""
        value = component.get(name)
        text = "" if value is None else value
        if not isinstance(text, str) or len(text.encode("utf-8", "surrogatepass")) > MAX_STRING_BYTES:
            raise self.refuse(name, f"a string of at most {MAX_STRING_BYTES} bytes", value)
        return text

    def integer(self, component: Component, name: str, low: int) -> None:
        """Check an integer of a component, if it is there: it must be in [low, 2**31)."""
        value = component.get(name, low)
        if type(value) is not int or not low <= value < 2**31:
            raise self.refuse(name, f"an integer in [{low}, 2**31)", value)

    def pattern(self, component: Component) -> int:
        """Return the fewest bytes that a pattern matches; it is a string, or a regular expression, which is checked."""
        pattern = component.get("pattern")
        if isinstance(pattern, Mapping) and len(pattern) == 1:
            if "String" in pattern:
                return len(self.string(pattern, "String").encode("utf-8", "surrogatepass"))
            if isinstance(pattern.get("Regex"), str):
                return self._fewest(pattern["Regex"])
        raise self.refuse("pattern", '{"String": ...} or {"Regex": ...}', pattern)

    def refuse(self, what: str, expected: str, actual: object) -> CheckpointError:
        """Return the error to raise for something that a tokenizer.json may not contain."""
        return CheckpointError(f"{self.source}: {what}", expected=expected, actual=quoted(actual))

    def _fewest(self, text: str) -> int:
        try:
            return check_regex(text)
        except UnsafeRegexError as error:
            raise CheckpointError(
                f"{self.source}: the regular expression {quoted(text)} is refused: {error}",
                expected="one that cannot take exponential time",
            ) from error


def _times(growth: float) -> Growth:
    return lambda component, place: growth


def _replace(component: Component, place: _Place) -> float:
    added, fewest = len(place.string(component, "content").encode("utf-8", "surrogatepass")), place.pattern(component)
    if not fewest:  # on an empty match the library panics at the ends of a text
        raise place.refuse("pattern", "one that matches no empty text", component["pattern"])
    return max(1.0, added / fewest)


def _with_strings(growth: float, *names: str) -> Growth:
    def check(component: Component, place: _Place) -> float:
        for name in names:
            place.string(component, name)
        return growth

    return check


def _prepend(component: Component, place: _Place) -> float:
    """Refuse to prepend an empty string: the library panics if a later normalizer changes the text then."""
    if not place.string(component, "prepend"):
        raise place.refuse("prepend", "a string that is not empty", component.get("prepend"))
    return 1.0


def _pieces_of_length(component: Component, place: _Place) -> float:
    place.integer(component, "length", 1)
    return 1.0


def _split(component: Component, place: _Place) -> float:
    place.pattern(component)
    return 1.0


def _strip(component: Component, place: _Place) -> float:
    place.integer(component, "start", 0)
    if component.get("stop") != 0:  # the library panics on a token shorter than that
        raise place.refuse("stop", "0", component.get("stop"))
    return 1.0


def _precompiled(component: Component, place: _Place) -> float:
    try:
        return max(1.0, longest_replacement(component.get("precompiled_charsmap")))
    except ValueError as error:
        raise CheckpointError(f"{place.source}: precompiled_charsmap is damaged: {error}") from error


_NORMALIZERS: dict[str, Growth] = {
    "Sequence": _times(1), "BertNormalizer": _times(3), "Strip": _times(1), "StripAccents": _times(3), "NFC": _times(3),
    "NFD": _times(4), "NFKC": _times(18), "NFKD": _times(18), "Lowercase": _times(2), "Nmt": _times(1),
    "Precompiled": _precompiled, "Replace": _replace, "Prepend": _prepend, "ByteLevel": _times(2),
}  # fmt: skip
_PRE_TOKENIZERS: dict[str, Growth] = {
    "Sequence": _times(1), "BertPreTokenizer": _times(1), "ByteLevel": _times(2), "CharDelimiterSplit": _times(1),
    "Metaspace": _with_strings(4, "replacement", "str_rep"), "Whitespace": _times(1), "WhitespaceSplit": _times(1),
    "Split": _split, "Punctuation": _times(1), "Digits": _times(1), "UnicodeScripts": _times(1),
    "FixedLength": _pieces_of_length,
}  # fmt: skip
_DECODERS: dict[str, Growth] = {
    "Sequence": _times(1), "BPEDecoder": _with_strings(1, "suffix"), "ByteLevel": _times(3), "ByteFallback": _times(1),
    "WordPiece": _with_strings(2, "prefix"), "Metaspace": _with_strings(1, "replacement", "str_rep"), "Fuse": _times(1),
    "CTC": _with_strings(2, "pad_token", "word_delimiter_token"), "Replace": _replace,
    "Strip": _strip,
}  # fmt: skip


def check_tokenizer(content: Mapping[str, object], source: str) -> None:
    """Raise CheckpointError for a tokenizer.json (its object; `source` is its path) that the library should not load.
    """
    normalizer = _Place(f"{source}: normalizer", _NORMALIZERS, "normalizers")
    splitter = _Place(f"{source}: pre_tokenizer", _PRE_TOKENIZERS, "pretokenizers")
    decoder = _Place(f"{source}: decoder", _DECODERS, "decoders")
    before = normalizer.growth(content.get("normalizer")) * splitter.growth(content.get("pre_tokenizer"))
    for what, growth in (("normalizer and pre_tokenizer", before), ("decoder", decoder.growth(content.get("decoder")))):
        if growth > MAX_GROWTH:
            raise CheckpointError(
                f"{source}: {what} blow text up", expected=f"at most to {MAX_GROWTH} times its size",
                actual=f"up to {growth:.0f} times",
            )  # fmt: skip
    _check_post_processor(content.get("post_processor"), source)
    _check_model(content.get("model"), source)
    _check_lengths(_added(content.get("added_tokens")), f"{source}: added_tokens")


def _check_post_processor(value: object, source: str) -> None:
    place = _Place(f"{source}: post_processor", _POST_PROCESSORS, "processors")
    if place.growth(value) > MAX_TEXT_COPIES:
        raise CheckpointError(f"{source}: post_processor repeats the text", expected=f"at most {MAX_TEXT_COPIES} times")


def _template(component: Component, place: _Place) -> float:
    special = component.get("special_tokens")
    if not isinstance(special, Mapping):
        raise place.refuse("special_tokens", "an object", special)
    for name, token in special.items():
        ids = token.get("ids") if isinstance(token, Mapping) else None
        is_row = isinstance(ids, list) and len(ids) <= MAX_TEMPLATE_PIECES
        if not is_row or not all(type(i) is int and 0 <= i < 2**32 for i in ids or ()):
            raise place.refuse(f"ids of the special token {quoted(name)}", "a short list of token ids", token)
    place.count_template()
    copies = [
        sum(_is_text(piece, texts, special, place) for piece in _pieces(component, name, place))
        for name, texts in _TEMPLATES.items()
    ]
    return float(max(copies))


def _pieces(component: Component, name: str, place: _Place) -> list[Any]:
    pieces = component.get(name)
    if not isinstance(pieces, list) or len(pieces) > MAX_TEMPLATE_PIECES:
        raise place.refuse(name, f"a list of at most {MAX_TEMPLATE_PIECES} pieces", pieces)
    return pieces


def _is_text(piece: Any, texts: str, special: Mapping[str, Any], place: _Place) -> bool:
    """Whether a piece of a template is one of the `texts` and not a special token; the token must be in `special`."""
    (kind, value), *more = piece.items() if isinstance(piece, Mapping) and piece else [("", None)]
    name = value.get("id") if isinstance(value, Mapping) else None
    is_token = kind == "SpecialToken" and isinstance(name, str) and name in special
    if more or not (is_token or (kind == "Sequence" and name in tuple(texts))):
        raise place.refuse("a piece of a template", "a sequence, or a token of special_tokens", piece)
    return not is_token


def _pair(component: Component, place: _Place) -> float:
    place.count_template()
    for name in ("sep", "cls"):
        value = component.get(name)
        token_id = value[1] if isinstance(value, list) and len(value) == 2 else None
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise place.refuse(name, "a token and its id", value)
    return 1.0


_TEMPLATES = {"single": "A", "pair": "AB"}
_POST_PROCESSORS: dict[str, Growth] = {
    "Sequence": _times(1), "TemplateProcessing": _template, "ByteLevel": _times(1), "BertProcessing": _pair,
    "RobertaProcessing": _pair,
}  # fmt: skip


def _check_model(value: object, source: str) -> None:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{source}: model", expected="an object", actual=quoted(value))
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        _Place(f"{source}: model", {}, "").string(value, name)
    _check_merges(value, source)
    vocab = value.get("vocab")
    tokens = vocab if isinstance(vocab, Mapping) else (row[0] for row in _rows(vocab))
    _check_lengths((token for token in tokens if isinstance(token, str)), f"{source}: model.vocab")


def _check_merges(model: Mapping[str, Any], source: str) -> None:
    """Check that the second token of each merge begins with `continuing_subword_prefix`: the library strips that
    without a look."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and parts and isinstance(parts[-1], str) and parts[-1].startswith(prefix)):
            raise CheckpointError(
                f"{source}: model.merges", expected=f"pairs whose second token begins with {quoted(prefix)}",
                actual=quoted(merge),
            )  # fmt: skip


def _rows(vocab: object) -> Iterator[list[Any]]:
    """Yield the rows [token, score] of a Unigram model; anything else in the list the library refuses itself."""
    yield from (row for row in (vocab if isinstance(vocab, list) else ()) if isinstance(row, list) and row)


def _added(tokens: object) -> Iterator[str]:
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, Mapping) and isinstance(token.get("content"), str):
            yield token["content"]


def _check_lengths(tokens: Iterator[str], source: str) -> None:
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"{source}: a token", expected=f"at most {MAX_TOKEN_CHARACTERS} characters", actual=quoted(longest)
        )
