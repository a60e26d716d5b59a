"""The check of tokenizer.json: real ones pass, and those that would blow text up or end in a panic are refused."""

import base64
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint

from cpmrt.errors import CheckpointError
from cpmrt.text.charsmap_check import longest_replacement
from cpmrt.text.regex_check import UnsafeRegexError, check_regex
from cpmrt.text.tokenizer_check import check_tokenizer
from cpmrt.weights.hub import BUNDLED

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"


@pytest.mark.parametrize("pattern", [
    GPT2, CL100K, O200K, PUNCTUATION, r"[一-龥぀-ゟ゠-ヿ]+", r"\s?\p{L}+|[^(\s|.,!?…。，、।۔،)]+", " {2,}",
    r"<\|[^|]*\|>",
    r"\d{1,3}(?=(?:\d{3})*\b)", "(?=a*b)a", r"\s+$", "a+(?:b+)?",
    r"(?<!\n)\n(?!\n)", r"(?i)abc|d+", r"(ab){3}", r"(?:ab)+", "a{,3}{", "", "x+?y*+", "[]a]+", r"[a&&[^b]]+",
])  # fmt: skip
def test_regular_expressions_of_tokenizers_pass(pattern):
    check_regex(pattern)


@pytest.mark.parametrize("pattern", [
    r"(a+)+$", r"(a|a)*$", r"(?:a*)*b", "a*a*a*a*b", "(a|b|ab)*c", "((a{1,9}){1,9}){1,9}c", "(a?){30}a",
    "a?" * 30 + "a" * 30, "a**", "a{2}+b", "a{1,9}{1,9}", "(?:a|b*)(?:c*|d)(?:e*f*|g)x*", r"(a)\1", r"(?<n>a\g<n>)",
    r"\k<n>", "(?x)a #(\n+", "(?#x)a", "(?~a)", "a*(?i)a*|a*", "(", "a)", "[a", "[]", "\\", "+a", "x" * 9000,
    "(" * 60 + ")" * 60, "(?=a*a*a*b)a", "(?=a*a*b)a", "a(?!a*a*b)", "a*(?=a*b)", "(?=(?=a*b)a*c)a", "a+a+$", r"a*a*\b",
    "(?:a+b)?a*c", "a{1,8}a{1,8}a{1,8}a{1,8}$", "a?" * 6 + "$",
])  # fmt: skip
def test_regular_expressions_that_may_take_for_ever_are_refused(pattern):
    with pytest.raises(UnsafeRegexError):
        check_regex(pattern)


@pytest.mark.parametrize(("pattern", "fewest"), [
    ("abc", 3), ("", 0), ("a?", 0), ("a+b*", 1), ("a{2,3}", 2), ("a{,3}", 0), ("ab|c", 1), ("(ab){3}", 6), ("^a$", 1),
    (r"\b", 0), (r"\s+(?!\S)|\s+", 1), ("(?=ab)", 0), ("(?<!ab)c", 1), ("[a-z]|x?", 0), ("(?i)ab", 2),
    (r"\p{L}\x41", 2),
])  # fmt: skip
def test_the_fewest_characters_of_an_expression(pattern, fewest):
    assert check_regex(pattern) == fewest


@given(st.text(alphabet="ab()[]{}|*+?\\^-,:<19pLi.$=!", max_size=20))
@example("a{0,3}" * 4 + "a+$")
@example("(?=a*a*b)a")
@example("(?:a{0,3}a{0,3}a*(?=b)|b)")
def test_what_passes_matches_in_bounded_time(pattern):
    """The library matches any accepted expression against a text made to fail, without reaching its own limit."""
    from tokenizers import Regex, pre_tokenizers

    try:
        check_regex(pattern)
    except UnsafeRegexError:
        return
    try:
        regex = Regex(pattern)
    except Exception:
        return
    for text in ("a" * 1000 + "!", "ab" * 500 + "!"):
        pre_tokenizers.Split(regex, "isolated").pre_tokenize_str(text)


def content_of(**changes):
    base = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    return base | changes


BIG = "x" * 1000
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"}
TEXT, TOKEN = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
SPECIAL = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}


def template(single, special=SPECIAL):
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


def sequence(parts, *items):
    return {"type": "Sequence", parts: list(items)}


def nested(depth):
    return {"type": "NFC"} if depth == 0 else sequence("normalizers", nested(depth - 1))


@pytest.mark.parametrize(("changes", "words"), [
    ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": BIG}}, "normalizer: content.*256 bytes"),
    ({"normalizer": {"type": "Prepend", "prepend": BIG}}, "normalizer: prepend: expected a string of at most 256"),
    ({"normalizer": sequence("normalizers", REPLACE, REPLACE, REPLACE)}, "blow text up.*256 times.*512 times"),
    ({"normalizer": REPLACE, "pre_tokenizer": sequence("pretokenizers", *[{"type": "ByteLevel"}] * 6)}, "512 times"),
    ({"normalizer": sequence("normalizers", {"type": "NFKD"}, {"type": "NFKD"})}, "324 times"),
    ({"normalizer": sequence("normalizers", {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "[ab]+"},
                                                              "content": "x" * 256})}, "768 times"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a*|b"}, "content": "x"}}, "pattern.*no empty text"),
    ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}}, "pattern.*no empty text"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+"}}}, r"expression '\(a\+\)\+' is refused"),
    ({"normalizer": {"type": "Replace", "pattern": "a", "content": ""}}, "pattern: expected"),
    ({"normalizer": {"prepend": BIG}}, "normalizer: type of a component: expected Sequence"),
    ({"normalizer": {"type": ["NFC"]}}, "type of a component"),
    ({"normalizer": nested(9)}, "nested 8 deep"),
    ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 65)}, "at most 64"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap is damaged"),
    ({"normalizer": {"type": "Precompiled"}}, "precompiled_charsmap is damaged"),
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "pre_tokenizer: length: expected an integer in .1,"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a)*"}}}, "pre_tokenizer: the regular expression"),
    ({"decoder": sequence("decoders", REPLACE, REPLACE, REPLACE)}, "decoder blow text up"),
    ({"decoder": {"type": "WordPiece", "prefix": BIG}}, "decoder: prefix"),
    ({"decoder": {"type": "Strip", "content": " ", "start": -1, "stop": 0}}, "decoder: start"),
    ({"post_processor": template([{"SpecialToken": {"id": "<none>", "type_id": 0}}])}, "a piece of a template.*<none>"),
    ({"post_processor": template([TEXT] * 5)}, "repeats the text"),
    ({"post_processor": sequence("processors", *[template([TEXT])] * 2)}, "add special tokens: expected one, got 2"),
    ({"post_processor": template([{"Sequence": {"id": "B", "type_id": 0}}])}, "a piece of a template"),
    ({"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 1}}, "decoder: stop: expected 0, got 1"),
    ({"model": {"vocab": {"a": 0}, "continuing_subword_prefix": "##", "merges": [["##a", "a"]]}}, "merges.*'##'"),
    ({"model": {"vocab": {"a": 0}, "continuing_subword_prefix": "##", "merges": ["a ##a", "a a"]}}, "got 'a a'"),
    ({"post_processor": template([TOKEN] * 65)}, "single: expected a list of at most 64"),
    ({"post_processor": template([TEXT], {"<s>": {"ids": [2**32]}})}, "ids of the special token"),
    ({"post_processor": template([TEXT], None)}, "special_tokens: expected an object"),
    ({"post_processor": {"type": "RobertaProcessing", "sep": ["</s>", 2**40], "cls": ["<s>", 1]}}, "sep: expected"),
    ({"model": None}, "model: expected an object"),
    ({"model": {"vocab": {"a": 0}, "end_of_word_suffix": BIG}}, "model: end_of_word_suffix"),
    ({"model": {"vocab": {"a" * 20000: 0}}}, "model.vocab: a token: expected at most 16384"),
    ({"model": {"type": "Unigram", "vocab": [["a" * 20000, 0.0]]}}, "model.vocab: a token"),
    ({"added_tokens": [{"id": 1, "content": "a" * 20000}]}, "added_tokens: a token"),
])  # fmt: skip
def test_what_a_tokenizer_may_not_contain_is_named(changes, words):
    with pytest.raises(CheckpointError, match=words) as caught:
        check_tokenizer(content_of(**changes), "tokenizer.json")
    assert str(caught.value).startswith("tokenizer.json: ") and len(str(caught.value)) < 500


@pytest.mark.parametrize("changes", [
    {"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "▁"},
                            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"})},
    {"normalizer": sequence("normalizers", {"type": "NFKC"}, {"type": "Lowercase"},
                            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "})},
    {"pre_tokenizer": sequence(
        "pretokenizers", {"type": "Split", "pattern": {"Regex": CL100K}}, {"type": "ByteLevel"})},
    {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}},
    {"post_processor": sequence("processors", {"type": "ByteLevel"}, template([TOKEN, TEXT]))},
    {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}},
    {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]}},
    {"model": {"vocab": {"a": 0}, "continuing_subword_prefix": "##", "merges": [["a", "##a"], "a ##a"]}},
    {"decoder": sequence("decoders", {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0})},
])  # fmt: skip
def test_what_real_tokenizers_contain_passes(changes):
    check_tokenizer(content_of(**changes), "tokenizer.json")


def test_real_tokenizers_pass(shared_data, tmp_path):
    bundled, byte_level = BUNDLED / "tokenizer.json", write_checkpoint(tmp_path) / "tokenizer.json"
    for path in (bundled, byte_level, *shared_data.glob("*tokenizer.json")):
        check_tokenizer(json.loads(path.read_text()), str(path))


def charsmap(units, replacements):
    trie = np.array(units, "<u4").tobytes()
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + replacements).decode()


def test_a_table_of_replacements_is_followed_as_the_library_does():
    from tokenizers import normalizers

    units, place = np.zeros(512, np.uint32), 256 ^ ord("A")
    units[0] = 256 << 10  # the root's children are at 256 ^ character
    units[place] = ord("A") | 1 << 8 | (place ^ 300) << 10  # "A" ends here, and its value is in unit 300
    units[300] = 1 << 31  # the replacement at byte 0
    table = charsmap(units, "bcd\0é\0".encode())
    assert longest_replacement(table) == 3
    assert normalizers.Precompiled(base64.b64decode(table)).normalize_str("xA") == "xbcd"
    for change, words in (
        ((300, 1 << 31 | 99), "beginning of a replacement"),
        ((300, 1 << 31 | 5), "beginning of a replacement"),
        ((0, 2**21 << 10), "leads out"),
    ):
        damaged = units.copy()
        damaged[change[0]] = change[1]
        with pytest.raises(ValueError, match=words):
            longest_replacement(charsmap(damaged, "bcd\0é\0".encode()))


@pytest.mark.parametrize("table", [None, "", "?", "AAAA", "AAEAAAAAAAAAAAAA", "/////w==", "BAAAAAAAAAD/"])
def test_a_damaged_table_of_replacements_is_refused(table):
    with pytest.raises(ValueError):
        longest_replacement(table)


def test_tables_of_sentencepiece_pass():
    sentencepiece = pytest.importorskip("sentencepiece")
    from io import BytesIO

    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    for rule in ("nmt_nfkc", "nfkc_cf"):
        model, lines = BytesIO(), (f"line number {i}" for i in range(200))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=40, normalization_rule_name=rule, minloglevel=9,
            hard_vocab_limit=False,
        )  # fmt: skip
        found = pb.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap
        assert longest_replacement(base64.b64encode(found).decode()) == 33


def test_a_normalizer_that_prepends_nothing_is_refused():
    """A Prepend normalizer with an empty string is refused, as the library panics if another normalizer follows."""
    parts = [{"type": "Prepend", "prepend": ""}, {"type": "StripAccents"}]
    with pytest.raises(CheckpointError, match="prepend: expected a string that is not empty, got ''"):
        check_tokenizer({"normalizer": {"type": "Sequence", "normalizers": parts}}, "tokenizer.json")
