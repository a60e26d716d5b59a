"""Tokenizers of random components: the library loads and runs all that pass the check, or refuses without a panic."""

import json

from hypothesis import given
from hypothesis import strategies as st

from cpmrt.errors import CpmrtError
from cpmrt.text import Tokenizer

TEXTS = ("", "a", "hello  World\n\n 12 é 𝒳 ▁a <s>!?", "a" * 200, "\u0300 a", "ﷺ" * 9, " \t\n" * 20, "\x00")
STRINGS = st.sampled_from(["", "a", "aa", " ", "▁", "\n", "x" * 50, "é", "𝒳", "<s>", "##"])
REGEXES = st.sampled_from([
    r"\s+", "a", "[a-z]", r"\p{L}+", "(a|b)", "(?i:A)", "(?=a)", "^", "$", "a?", "", r"\b", ".", "[^a]*", "a{2,3}",
    "(?<=a)b", r" ?\p{L}+|\s",
])  # fmt: skip
PATTERNS = st.builds(lambda text: {"String": text}, STRINGS) | st.builds(lambda text: {"Regex": text}, REGEXES)
FLAGS, COUNTS = st.booleans(), st.sampled_from([0, 1, 2, 7])
BEHAVIORS = st.sampled_from(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
SCHEMES = st.sampled_from(["always", "first", "never"])


def component(kind, **fields):
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


def nested(parts, *kinds):
    def sequence(inner):
        return component("Sequence", **{parts: st.lists(inner, max_size=3)})

    return st.recursive(st.one_of(kinds), sequence, max_leaves=4)


def plain(*kinds):
    return [component(kind) for kind in kinds]


NORMALIZERS = nested(
    "normalizers", *plain("StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "ByteLevel"),
    component("Strip", strip_left=FLAGS, strip_right=FLAGS), component("Prepend", prepend=STRINGS),
    component("Replace", pattern=PATTERNS, content=STRINGS),
    component("BertNormalizer", clean_text=FLAGS, handle_chinese_chars=FLAGS, strip_accents=FLAGS, lowercase=FLAGS),
)  # fmt: skip
PRE_TOKENIZERS = nested(
    "pretokenizers", *plain("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts"),
    component("ByteLevel", add_prefix_space=FLAGS, trim_offsets=FLAGS, use_regex=FLAGS),
    component("CharDelimiterSplit", delimiter=STRINGS), component("FixedLength", length=COUNTS),
    component("Metaspace", replacement=STRINGS, prepend_scheme=SCHEMES, split=FLAGS),
    component("Split", pattern=PATTERNS, behavior=BEHAVIORS, invert=FLAGS),
    component("Punctuation", behavior=BEHAVIORS), component("Digits", individual_digits=FLAGS),
)  # fmt: skip
DECODERS = nested(
    "decoders", *plain("ByteLevel", "ByteFallback", "Fuse"),
    component("BPEDecoder", suffix=STRINGS), component("WordPiece", prefix=STRINGS, cleanup=FLAGS),
    component("Metaspace", replacement=STRINGS, prepend_scheme=SCHEMES, split=FLAGS),
    component("CTC", pad_token=STRINGS, word_delimiter_token=STRINGS, cleanup=FLAGS),
    component("Replace", pattern=PATTERNS, content=STRINGS),
    component("Strip", content=st.sampled_from("a ▁"), start=COUNTS, stop=COUNTS),
)  # fmt: skip
PIECES = st.sampled_from([
    {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 7}},
    {"Sequence": {"id": "B", "type_id": 0}},
])  # fmt: skip
SPECIAL = {"<s>": {"id": "<s>", "ids": [1, 1], "tokens": ["<s>"]}}
POST_PROCESSORS = nested(
    "processors", component("ByteLevel", add_prefix_space=FLAGS, trim_offsets=FLAGS, use_regex=FLAGS),
    component("RobertaProcessing", sep=st.just(["</s>", 2]), cls=st.just(["<s>", 1]), trim_offsets=FLAGS,
              add_prefix_space=FLAGS),
    component("BertProcessing", sep=st.just(["</s>", 2]), cls=st.just(["<s>", 1])),
    component("TemplateProcessing", single=st.lists(PIECES, max_size=3), pair=st.lists(PIECES, max_size=3),
              special_tokens=st.just(SPECIAL)),
)  # fmt: skip
VOCAB = {token: number for number, token in enumerate(
    ["<unk>", "<s>", "</s>", "a", "b", "▁", "▁a", "ab", "é", " ", "##b", "", "aaaa", "<0x41>", "a##b"]
)}  # fmt: skip
AFFIXES = st.sampled_from([None, "", "##", "</w>"])
MERGES = st.lists(st.tuples(st.sampled_from("ab▁"), st.sampled_from(["a", "b", "##b", ""])).map(list), max_size=2)
MODELS = st.one_of(
    component("BPE", dropout=st.sampled_from([None, 0.0, 0.5, 1.0]), unk_token=st.sampled_from([None, "<unk>", "zz"]),
              continuing_subword_prefix=AFFIXES, end_of_word_suffix=AFFIXES, fuse_unk=FLAGS, byte_fallback=FLAGS,
              ignore_merges=FLAGS, vocab=st.just(VOCAB), merges=MERGES),
    component("Unigram", unk_id=st.sampled_from([None, 0, 3, 99]), byte_fallback=FLAGS,
              vocab=st.lists(st.tuples(st.sampled_from(list(VOCAB)), st.sampled_from([0.0, -1.0, 1e30])).map(list))),
    component("WordPiece", unk_token=st.sampled_from(["<unk>", "zz"]), continuing_subword_prefix=STRINGS,
              max_input_chars_per_word=COUNTS, vocab=st.just(VOCAB)),
    component("WordLevel", unk_token=st.sampled_from(["<unk>", "zz"]), vocab=st.just(VOCAB)),
)  # fmt: skip
CONTENTS = st.fixed_dictionaries({
    "version": st.just("1.0"), "truncation": st.none(), "padding": st.none(), "added_tokens": st.just([]),
    "normalizer": st.none() | NORMALIZERS, "pre_tokenizer": st.none() | PRE_TOKENIZERS,
    "post_processor": st.none() | POST_PROCESSORS, "decoder": st.none() | DECODERS, "model": MODELS,
})  # fmt: skip


@given(st.lists(CONTENTS, min_size=5, max_size=5))
def test_nothing_that_passes_the_check_panics(tmp_path, capfd, contents):
    for content in contents:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        try:
            tokenizer = Tokenizer.open(tmp_path)
            for text in TEXTS:
                ids = tokenizer.encode(text)
                tokenizer.decode(ids)
                assert len(ids) <= 1000 * (len(text) + 1)
            tokenizer.decode(range(20))
        except CpmrtError as error:
            assert "\n" not in str(error) and len(str(error)) < 1500
    assert capfd.readouterr().err == ""
