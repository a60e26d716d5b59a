"""Tokenizers from GGUF files: the ids of the tokenizer that the file was made from, on thousands of texts."""

import json
from functools import cache

import gguf_files as files
import numpy as np
import pytest
from gguf_tokenizers import DATA, SPLITTERS, texts, trained
from tokenizers import Tokenizer as Library

from cpmrt.errors import CheckpointError, UnsupportedModelError
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights.files import MAX_JSON_BYTES
from cpmrt.weights.gguf import vocabulary
from cpmrt.weights.gguf.folder import read_member
from cpmrt.weights.model_files import read_json

COUNTS = pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.all)])
"""The number of texts on which ids are compared."""
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SIZES = {
    "block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64,
    "attention.head_count": 1,
}  # fmt: skip


def write(path, keys):
    """Write a GGUF file with these tokenizer keys and those that a config needs, and return its path."""
    sizes = [(f"llama.{key}", files.value(files.U32, number)) for key, number in SIZES.items()]
    architecture = ("general.architecture", files.value(files.STRING, "llama"))
    count = ("llama.vocab_size", files.value(files.U32, 1000))
    own = [(key if "." in key else f"tokenizer.ggml.{key}", files.value(*value)) for key, value in keys.items()]
    return files.Content([architecture, count, *sizes, *own], []).write(path)


def listed(kind, items):
    return files.ARRAY, (kind, list(items))


def sentence_piece_keys():
    """Return the keys of MiniCPM3's tokenizer.json as the converter writes them: one score per token, used for order
    only."""
    content = json.loads((DATA / "minicpm3_tokenizer.json").read_text())
    tokens = {token_id: token for token, token_id in content["model"]["vocab"].items()}
    types = {token_id: BYTE if token.startswith("<0x") else NORMAL for token_id, token in tokens.items()}
    for token in content["added_tokens"]:
        tokens[token["id"]], types[token["id"]] = token["content"], CONTROL
    types[0] = UNKNOWN
    scores = [-float(i) for i in range(len(tokens))]
    for token in ("。" * 6, "```"):  # user-defined pieces have score 0 and are merged first
        token_id = content["model"]["vocab"][token]
        types[token_id], scores[token_id] = USER, 0.0
    return {
        "model": (files.STRING, "llama"), "tokens": listed(files.STRING, (tokens[i] for i in range(len(tokens)))),
        "token_type": listed(files.I32, (types[i] for i in range(len(tokens)))),
        "scores": listed(files.F32, scores), "bos_token_id": (files.U32, 1),
        "eos_token_id": (files.U32, 2), "unknown_token_id": (files.U32, 0), "add_bos_token": (files.BOOL, 1),
    }  # fmt: skip


@pytest.mark.skipif(not DATA.exists(), reason="needs the tokenizers beside the project")
@COUNTS
def test_sentence_piece_gives_the_ids_of_tokenizer_json(tmp_path, count):
    found = Tokenizer.open(write(tmp_path / "a.gguf", sentence_piece_keys()))
    expected = Library.from_file(str(DATA / "minicpm3_tokenizer.json"))
    for text in texts(["<|im_end|>", "<|im_start|>", "<s>", "</s>", "<unk>"], count):
        ids = found.encode(text, add_special_tokens=False)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids) == expected.decode(ids) or "\ufffd" in expected.decode(ids)
    assert found.bos_token_id == 1 and found.encode("a")[0] == 1 and found.eos_token_ids == (2,)


@pytest.mark.all
@pytest.mark.skipif(not DATA.exists(), reason="needs the tokenizers beside the project")
@COUNTS
def test_sentence_piece_gives_the_ids_of_the_library(tmp_path, count):
    library = pytest.importorskip("sentencepiece")
    expected = library.SentencePieceProcessor(str(DATA / "minicpm4_tokenizer.model"))
    pieces = range(expected.vocab_size())
    kinds = {expected.is_unknown: UNKNOWN, expected.is_control: CONTROL, expected.is_byte: BYTE}
    types = [next((kind for test, kind in kinds.items() if test(i)), NORMAL) for i in pieces]
    # User-defined pieces have no score. The library finds these pieces before it merges, Hugging Face by merging.
    defined = [i for i in pieces if types[i] == NORMAL and expected.get_score(i) == 0]
    for i in defined:
        types[i] = USER
    long = [expected.id_to_piece(i).replace("▁", " ") for i in defined if len(expected.id_to_piece(i)) > 1]
    keys = sentence_piece_keys() | {
        "tokens": listed(files.STRING, (expected.id_to_piece(i) for i in pieces)),
        "token_type": listed(files.I32, types), "scores": listed(files.F32, (expected.get_score(i) for i in pieces)),
    }  # fmt: skip
    keys |= {"add_space_prefix": (files.BOOL, 0)}  # as the model's own settings have it
    found = Tokenizer.open(write(tmp_path / "a.gguf", keys))
    same = [text for text in texts(count=count, seed=1) if not any(piece in text for piece in long)]
    assert len(same) > count / 2
    for text in same:
        ids = expected.encode(text)
        assert found.encode(text, add_special_tokens=False) == ids, text
        assert found.decode(ids) == expected.decode(ids)


@cache
def plain():
    """Return a tokenizer that splits text as GPT-2's does."""
    return trained(())


def byte_pair_keys(library, pre):
    content = json.loads(library.to_str())
    tokens = {token_id: token for token, token_id in library.get_vocab().items()}
    special = {token["id"]: CONTROL if token["special"] else USER for token in content["added_tokens"]}
    return {
        "model": (files.STRING, "gpt2"), "tokens": listed(files.STRING, (tokens[i] for i in range(len(tokens)))),
        "token_type": listed(files.I32, (special.get(i, NORMAL) for i in range(len(tokens)))),
        "merges": listed(files.STRING, (" ".join(pair) for pair in content["model"]["merges"])),
    } | ({} if pre is None else {"pre": (files.STRING, pre)})  # fmt: skip


@COUNTS
@pytest.mark.parametrize("pre", SPLITTERS)
def test_byte_pairs_give_the_ids_of_the_tokenizer_that_they_are_from(tmp_path, pre, count):
    expected = trained(**SPLITTERS[pre])
    found = Tokenizer.open(write(tmp_path / "a.gguf", byte_pair_keys(expected, pre)))
    for text in texts(["<|im_start|>", "<|im_end|>", "<think>"], count):
        ids = found.encode(text)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert found.special_ids == {expected.token_to_id("<|im_start|>"), expected.token_to_id("<|im_end|>")}


def test_minicpm5_is_told_from_its_vocabulary_how_signs_and_letters_are_split(tmp_path):
    apart = trained((r"\p{N}{1,3}", SPLITTERS["smollm"]["pattern"][1]), ignore_merges=True)
    found = Tokenizer.open(write(tmp_path / "a.gguf", byte_pair_keys(apart, "minicpm5")))
    for text in texts(seed=7):
        assert found.encode(text) == apart.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(("pre", "is_first"), [
    ("llama-bpe", True), ("llama3", True), ("llama-v3", True), ("qwen2", False), ("gpt-2", False), (None, False),
])  # fmt: skip
def test_a_file_that_does_not_say_whether_bos_comes_first_is_read_as_llama_cpp_reads_it(tmp_path, pre, is_first):
    library = plain()
    start = library.token_to_id("<|im_start|>")
    keys = byte_pair_keys(library, pre) | {"bos_token_id": (files.U32, start)}
    assert (Tokenizer.open(write(tmp_path / "a.gguf", keys)).encode("a")[0] == start) == is_first
    keys |= {"add_bos_token": (files.BOOL, not is_first)}
    assert (Tokenizer.open(write(tmp_path / "b.gguf", keys)).encode("a")[0] == start) != is_first


def test_a_file_without_a_name_splits_as_llama_cpp_does_then(tmp_path):
    found = Tokenizer.open(write(tmp_path / "a.gguf", byte_pair_keys(plain(), None)))
    pieces = [found.decode([token_id]) for token_id in found.encode("abc 1234567 don't!?=+x")]
    assert "".join(pieces) == "abc 1234567 don't!?=+x"
    assert not any(len(piece.strip()) > 3 and piece.strip().isdigit() for piece in pieces)


def test_a_whole_tokenizer_json_in_the_file_counts(tmp_path):
    expected = trained(("x+",))
    keys = byte_pair_keys(expected, "gpt-2") | {"tokenizer.huggingface.json": (files.STRING, expected.to_str())}
    found = Tokenizer.open(write(tmp_path / "a.gguf", keys))
    for text in texts(count=200):
        assert found.encode(text) == expected.encode(text, add_special_tokens=False).ids


def test_chat_template_and_special_tokens(tmp_path):
    library = plain()
    end = library.token_to_id("<|im_end|>")
    keys = byte_pair_keys(library, "gpt-2") | {
        "eos_token_id": (files.U32, end), "bos_token_id": (files.U32, library.token_to_id("<|im_start|>")),
        "tokenizer.chat_template": (files.STRING, "{{ eos_token }}{{ messages[0].content }}"),
        "tokenizer.chat_templates": listed(files.STRING, ["tool_use"]),
        "tokenizer.chat_template.tool_use": (files.STRING, "tools: {{ tools }}"),
    }  # fmt: skip
    path = write(tmp_path / "a.gguf", keys)
    template = ChatTemplate.open(path)
    assert template.render([{"role": "user", "content": "hi"}]) == "<|im_end|>hi" and template.takes_tools
    tokenizer = Tokenizer.open(path)
    assert tokenizer.eos_token_ids == (end,) and tokenizer.encode("a")[0] != tokenizer.bos_token_id


def _changed(key, value):
    return lambda keys: keys | {key: value}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_changed("model", (files.STRING, "t5")), "'tokenizer.ggml.model': expected llama | gpt2, got 't5'"),
        (_changed("pre", (files.STRING, "tekken")), "'tokenizer.ggml.pre': this way of splitting text is not known"),
        (_changed("pre", (files.U32, 3)), "got 3"),
        (_changed("tokens", (files.STRING, "a")), "'tokenizer.ggml.tokens': expected a list of tokens"),
        (_changed("tokens", listed(files.STRING, [])), "expected a list of tokens"),
        (_changed("token_type", listed(files.I32, [1, 1])), "'tokenizer.ggml.token_type': expected 1503 numbers"),
        (_changed("token_type", listed(files.I32, [0] * 1503)), "expected types from 1 to 6, got 0"),
        (_changed("token_type", listed(files.I32, [7] * 1503)), "expected types from 1 to 6, got 7"),
        (_changed("merges", listed(files.I32, [1])), "'tokenizer.ggml.merges': expected a list of strings"),
        (_changed("merges", listed(files.STRING, ["a b c"])), "cannot be read"),
        (_changed("merges", listed(files.STRING, ["no such"])), "cannot be read"),
        (_changed("eos_token_id", (files.U32, 1503)), "eos_token_id': expected a token id in [0, 1503)"),
        (_changed("bos_token_id", (files.STRING, "<s>")), "'tokenizer.ggml.bos_token_id'"),
        (_changed("add_bos_token", (files.U32, 1)), "'tokenizer.ggml.add_bos_token': expected a truth value"),
        (_changed("tokenizer.chat_template", (files.U32, 1)), "'tokenizer.chat_template': expected a template"),
        (_changed("tokenizer.huggingface.json", (files.STRING, "{")), "'tokenizer.huggingface.json' is not valid JSON"),
    ],
)
def test_malformed_tokenizers_are_refused_by_key(tmp_path, change, words):
    library = plain()
    path = write(tmp_path / "bad.gguf", change(byte_pair_keys(library, "gpt-2")))
    with pytest.raises((CheckpointError, UnsupportedModelError)) as found:
        Tokenizer.open(path)
        ChatTemplate.open(path)
    assert words in str(found.value) and str(path) in str(found.value)


@pytest.mark.parametrize("key", ["model", "pre"])
def test_what_a_whole_tokenizer_json_leaves_unread_is_checked_as_well(tmp_path, key):
    library = plain()
    whole = {"tokenizer.huggingface.json": (files.STRING, library.to_str())}
    keys = byte_pair_keys(library, "gpt-2") | whole | {key: listed(files.U32, [1, 2])}
    for opener in (Tokenizer, ChatTemplate):
        with pytest.raises(CheckpointError, match=f"'tokenizer.ggml.{key}': expected a string"):
            opener.open(write(tmp_path / "bad.gguf", keys))


def test_a_piece_that_is_too_long_to_be_cut_everywhere_is_refused(tmp_path):
    tokens = ["<unk>", "a", "a" * 257]
    keys = {"model": (files.STRING, "llama"), "tokens": listed(files.STRING, tokens)}
    keys["scores"] = listed(files.F32, [0.0, -1.0, -2.0])
    with pytest.raises(CheckpointError, match="a piece: expected at most 256 characters, got 257"):
        Tokenizer.open(write(tmp_path / "bad.gguf", keys))


def test_more_tokens_than_any_vocabulary_has_are_refused(tmp_path, monkeypatch):
    keys = byte_pair_keys(plain(), "gpt-2")
    path, count = write(tmp_path / "a.gguf", keys), len(keys["tokens"][1][1])
    monkeypatch.setattr(vocabulary, "MAX_TOKENS", count)
    assert Tokenizer.open(path).encode("a")
    monkeypatch.setattr(vocabulary, "MAX_TOKENS", count - 1)
    with pytest.raises(CheckpointError, match=f"'tokenizer.ggml.tokens': expected at most {count - 1} tokens, got"):
        Tokenizer.open(path)


def test_more_pairs_than_any_vocabulary_has_are_refused(tmp_path, monkeypatch):
    """A small file whose tokens are all parts of a long text would give so many merges that they fill the memory."""
    tokens = ["<unk>", *sorted({"abcd"[begin:end] for begin in range(4) for end in range(begin + 1, 5)})]
    keys = {"model": (files.STRING, "llama"), "tokens": listed(files.STRING, tokens)}
    keys["scores"] = listed(files.F32, [-float(i) for i in range(len(tokens))])
    path = write(tmp_path / "a.gguf", keys)
    num_pairs = 3 * 1 + 2 * 2 + 1 * 3  # cuts of the tokens of two, three and four letters
    monkeypatch.setattr(vocabulary, "MAX_MERGES", num_pairs)
    assert len(json.loads(read_member(path, "tokenizer.json"))["model"]["merges"]) == num_pairs
    monkeypatch.setattr(vocabulary, "MAX_MERGES", num_pairs - 1)
    with pytest.raises(CheckpointError, match=f"make a token: expected at most {num_pairs - 1}, got more"):
        read_member(path, "tokenizer.json")


def test_half_of_a_surrogate_pair_in_a_whole_tokenizer_json_is_refused(tmp_path):
    keys = byte_pair_keys(plain(), "gpt-2") | {"tokenizer.huggingface.json": (files.STRING, '{"model": "\\ud800"}')}
    path = write(tmp_path / "bad.gguf", keys)
    with pytest.raises(CheckpointError, match=r"bad\.gguf/tokenizer\.json is not valid Unicode"):
        Tokenizer.open(path)


def test_what_a_file_says_is_limited_as_the_files_of_a_folder_are(tmp_path):
    keys = byte_pair_keys(plain(), "gpt-2") | {"tokenizer.chat_template": (files.STRING, "x" * MAX_JSON_BYTES)}
    path = write(tmp_path / "large.gguf", keys)
    with pytest.raises(CheckpointError, match=r"large\.gguf/tokenizer_config\.json is too large: expected"):
        read_json(path / "tokenizer_config.json")


def test_a_piece_with_a_space_is_no_pair(tmp_path):
    """Merges are written as "left right" strings, or as lists if a piece contains a space and a string would be
    ambiguous."""
    pieces = ["a", "b", "ab", "abab"]
    for more, expected in (([], "a b"), (["a b"], ["a", "b"])):
        tokens = ["<unk>", *pieces, *more]
        keys = {
            "model": (files.STRING, "llama"), "tokens": listed(files.STRING, tokens),
            "token_type": listed(files.I32, [UNKNOWN, *[NORMAL] * (len(tokens) - 1)]),
            "scores": listed(files.F32, [-float(i) for i in range(len(tokens))]),
            "unknown_token_id": (files.U32, 0), "add_space_prefix": (files.BOOL, 0),
        }  # fmt: skip
        path = write(tmp_path / f"{len(more)}.gguf", keys)
        assert json.loads(read_member(path, "tokenizer.json"))["model"]["merges"][0] == expected
        assert Tokenizer.open(path).encode("ababb", add_special_tokens=False) == [4, 2]


def test_scores_must_be_there_for_sentence_piece(tmp_path):
    tokens = ["<unk>", "<s>", "a"]
    keys = {"model": (files.STRING, "llama"), "tokens": listed(files.STRING, tokens)}
    for scores in (None, [1.0], [0.0, 1.0, float("nan")]):
        more = {} if scores is None else {"scores": listed(files.F32, scores)}
        with pytest.raises(CheckpointError, match="'tokenizer.ggml.scores'"):
            Tokenizer.open(write(tmp_path / "bad.gguf", keys | more))


def test_unused_tokens_are_no_tokens_and_the_first_of_two_alike_counts(tmp_path):
    library = plain()
    keys = byte_pair_keys(library, "gpt-2")
    tokens = [*keys["tokens"][1][1], "[PAD0]", "a"]
    keys |= {
        "tokens": listed(files.STRING, tokens),
        "token_type": listed(files.I32, [*keys["token_type"][1][1], UNUSED, NORMAL]),
    }
    found = Tokenizer.open(write(tmp_path / "a.gguf", keys))
    assert found.token_id("[PAD0]") is None and found.token_id("a") == library.token_to_id("a")
    assert found.decode([len(tokens) - 2]) == ""
    assert np.array_equal(found.encode("[PAD0]"), library.encode("[PAD0]").ids)
