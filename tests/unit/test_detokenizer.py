"""Streaming text: equal to decoding at once, complete characters only, for every kind of tokenizer."""

import shutil
from pathlib import Path

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from cpmrt.text import Detokenizer, Tokenizer

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
SPECIAL = ["<unk>", "<s>", "</s>"]
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def sentencepiece_like():
    pieces = ["▁", "a", "b", "c", "▁a", "▁b", "▁▁", "\n", "你", "好", "▁你好", "ab", "\ufffd", "<0xZZ>"]
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocab, [("a", "b"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(SPECIAL)
    library.add_tokens([AddedToken("<tool>", special=False)])
    return library


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "Ġa", "ä½", "½ł", "aä"])}
    library = Library(models.BPE(vocab, [("Ġ", "a"), ("ä", "½")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.add_tokens([AddedToken("<tool call>", special=False), AddedToken("工具", special=False)])
    return library


def metaspace():
    vocab = {token: i for i, token in enumerate(["<unk>", "▁", "▁a", "a", "b", "你"])}
    library = Library(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    library.add_special_tokens(["<unk>"])
    return library


LIBRARIES = {"sentencepiece": sentencepiece_like(), "byte_level": byte_level(), "metaspace": metaspace()}


@pytest.fixture(scope="module", params=[*LIBRARIES, "minicpm3"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "tokenizer.json"
    if request.param in LIBRARIES:
        LIBRARIES[request.param].save(str(path))
    elif (DATA / "minicpm3_tokenizer.json").exists():
        shutil.copy(DATA / "minicpm3_tokenizer.json", path)
    else:
        pytest.skip("no shared data")
    return Tokenizer.open(folder)


def token_ids(tokenizer):
    """Return a strategy of token id lists: bytes, special tokens, ids without a token, often those hard to decode."""
    hard = [tokenizer.token_id(text) for text in ["▁", "▁a", "\n", "你", "<s>", "<tool>", "ä½", "<|end|>"]]
    hard += [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"\xf0\x9f\x91\xa8\xe4\xbd\xa0 a\xff\xed\xa0"]
    known = [token_id for token_id in hard if token_id is not None]
    return st.lists(st.sampled_from(known) | st.integers(0, tokenizer.vocab_size + 3), max_size=24)


@pytest.mark.parametrize("in_prompt", range(5))
def test_a_character_of_four_bytes_may_begin_anywhere_in_the_prompt(tmp_path, in_prompt):
    LIBRARIES["sentencepiece"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    ids = [tokenizer.token_id(text) for text in ("a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b")]
    detokenizer = Detokenizer(tokenizer, ids[: 1 + in_prompt])
    assert stream(detokenizer, ids[1 + in_prompt :]) == ("b" if in_prompt == 4 else "\U0001f600b")


def stream(detokenizer, ids):
    return "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.flush()


@examples(40)
@given(st.data())
def test_pieces_join_to_what_decoding_at_once_gives(tokenizer, data):
    ids = data.draw(token_ids(tokenizer))
    assert stream(Detokenizer(tokenizer), ids) == tokenizer.decode(ids)
    at_once = Detokenizer(tokenizer)
    assert at_once.push(ids) + at_once.flush() == tokenizer.decode(ids)


@examples(40)
@given(st.data())
def test_pieces_are_what_the_output_adds_to_the_prompt(tokenizer, data):
    prompt, ids = data.draw(token_ids(tokenizer)), data.draw(token_ids(tokenizer))
    before = Detokenizer(tokenizer)  # without a flush, so that an incomplete character stays in the output
    assert before.push(prompt) + stream(Detokenizer(tokenizer, prompt), ids) == tokenizer.decode(prompt + ids)


@examples(40)
@given(st.data())
def test_decoding_equals_the_library_on_valid_text(tokenizer, data):
    ids = [token_id for token_id in data.draw(token_ids(tokenizer)) if token_id < tokenizer.vocab_size]
    for skip in (True, False):
        expected = tokenizer._library.decode(ids, skip_special_tokens=skip)
        ours = tokenizer.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in expected or tokenizer.token_id("<0xE4>") is None:
            assert ours == expected
        else:
            assert "\ufffd" in ours


@examples(40)
@given(st.text(max_size=20) | st.text("你好 👨👩👧\u200dé\n▁a", max_size=20))
def test_no_replacement_character_while_valid_text_arrives(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    assert "".join(pieces).count("\ufffd") <= text.count("\ufffd")


@pytest.mark.parametrize("name", ["sentencepiece", "byte_level"])
def test_emoji_come_character_by_character(name, tmp_path):
    LIBRARIES[name].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    ids = tokenizer.encode(FAMILY)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"))
    pieces = [piece for piece in (detokenizer.push([token_id]) for token_id in ids) if piece.strip()]
    assert len(ids) > 15 and pieces[-5:] == list(FAMILY)
    assert detokenizer.flush() == ""


def test_leading_space_is_kept_after_a_prompt_and_stripped_without_one(tmp_path):
    LIBRARIES["sentencepiece"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    word, bos, space = (tokenizer.token_id(text) for text in ("▁a", "<s>", "▁"))
    assert stream(Detokenizer(tokenizer, [word]), [word, bos, word]) == " a a"
    assert stream(Detokenizer(tokenizer, [bos]), [bos, word, word]) == "a a"
    assert stream(Detokenizer(tokenizer), [space, bos, word]) == " a"


def test_bytes_around_a_special_token_join_to_a_character(tmp_path):
    LIBRARIES["sentencepiece"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    first, second, third = (tokenizer.token_id(f"<0x{byte:02X}>") for byte in "你".encode())
    bad, eos = tokenizer.token_id("<0xFF>"), tokenizer.token_id("</s>")
    assert stream(Detokenizer(tokenizer), [first, eos, second, third]) == "你"
    assert stream(Detokenizer(tokenizer), [first, second, third, bad]) == "你\ufffd"
    assert stream(Detokenizer(tokenizer), [first, second]) == "\ufffd"
    assert stream(Detokenizer(tokenizer, [first, second]), [third]) == "你"


def test_a_token_costs_the_same_after_many(tmp_path):
    LIBRARIES["sentencepiece"].save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.open(tmp_path)
    detokenizer, asked = Detokenizer(tokenizer), []
    tokenizer._bytes._decode = lambda ids: asked.append(len(ids)) or "x" * len(ids)
    for _ in range(500):
        detokenizer.push([3 + 0xFF, 300])
    assert max(asked) <= 2 and len(asked) < 12


def test_special_tokens_that_are_to_be_shown(tmp_path):
    from tiny_checkpoint import write_tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    ids = tokenizer.encode("</s>a</s><unk>b", add_special_tokens=False)
    eos = tokenizer.token_id("</s>")
    assert Detokenizer(tokenizer).push(ids) == "ab"
    assert Detokenizer(tokenizer, shown_ids=frozenset({eos})).push(ids) == "</s>a</s>b"
