"""The tokenizer of a checkpoint: BOS, special and added tokens, and errors for malformed files."""

import json
import shutil
from pathlib import Path

import pytest
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.errors import CheckpointError, ContextLengthError, CpmrtError, RequestError
from cpmrt.text import Tokenizer
from cpmrt.text.encoding import PromptLimit

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
VOCAB = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256))]


def added(token_id, content, special=True):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    return {"id": token_id, "content": content, **flags}


def tokenizer_json(with_bos=True):
    start = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if with_bos else []
    single = [*start, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(VOCAB)},
            "merges": [["▁", "a"]],
        },
    }


def write(folder, content=None, **files):
    """Write a tokenizer folder: tokenizer.json and the files beside it, named without .json; return the folder."""
    files["tokenizer"] = tokenizer_json() if content is None else content
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


BOS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_bos_as_the_checkpoint_says_and_never_doubled(tmp_path, processor, add_bos):
    config = BOS if add_bos is None else BOS | {"add_bos_token": add_bos}
    tokenizer = Tokenizer.open(write(tmp_path, tokenizer_json(processor), tokenizer_config=config))
    wanted = processor if add_bos is None else add_bos
    assert tokenizer.encode("ab") == ([1, 4, 5] if wanted else [4, 5])
    assert tokenizer.encode("<s>ab") == [1, 4, 5]
    assert tokenizer.encode("<s><s>") == [1, 1]
    assert tokenizer.encode("") == ([1] if wanted else [])
    assert tokenizer.encode("ab", add_special_tokens=False) == [4, 5]


def test_bos_is_not_doubled_where_no_file_names_it(tmp_path):
    tokenizer = Tokenizer.open(write(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert tokenizer.encode("<s>ab") == tokenizer.encode("ab") == [1, 4, 5]


def test_tokens_named_by_the_config(tmp_path):
    tokenizer = Tokenizer.open(write(tmp_path, tokenizer_config=BOS))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == len(VOCAB)
    assert (tokenizer.token_id("▁a"), tokenizer.token_id("absent")) == (6, None)


@pytest.mark.parametrize("nothing", [None, ""])
def test_special_tokens_map_fills_what_the_config_leaves_open(tmp_path, nothing):
    folder = write(tmp_path, tokenizer_config={"bos_token": nothing, "eos_token": "</s>"}, special_tokens_map=BOS)
    assert Tokenizer.open(folder).bos_token_id == 1
    (folder / "special_tokens_map.json").unlink()
    assert Tokenizer.open(folder).bos_token_id is None


def test_special_tokens_in_text_are_special_and_skipped_when_decoding(tmp_path):
    tokenizer = Tokenizer.open(write(tmp_path))
    ids = tokenizer.encode("a</s>b")
    assert ids == [1, 4, 2, 5]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>b"


def test_a_vocabulary_token_named_special_by_the_config_becomes_one(tmp_path):
    folder = write(tmp_path, tokenizer_config=BOS | {"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("a<|im_end|>") == [1, 4, 7]
    assert tokenizer.decode([4, 7]) == "a"


def test_added_tokens_missing_from_tokenizer_json_are_added(tmp_path):
    size = len(VOCAB)
    decoder = {str(size): {"content": "<x>", "special": True}, "1": {"content": "<s>", "special": True}}
    folder = write(
        tmp_path, tokenizer_config={"added_tokens_decoder": decoder}, added_tokens={"<y>": size + 1, "<x>": size}
    )
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode("a<x>b<y>") == [1, 4, size, 5, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<y>"


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path):
    assert len(Tokenizer.open(write(tmp_path)).encode("ab" * 50)) == 101


def test_padding_in_the_file_does_not_lengthen_prompts(tmp_path):
    padding = {
        "strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<unk>",
    }  # fmt: skip
    assert Tokenizer.open(write(tmp_path, tokenizer_json() | {"padding": padding})).encode("ab") == [1, 4, 5]


def test_unknown_ids_add_nothing(tmp_path):
    assert Tokenizer.open(write(tmp_path)).decode([4, 9999, 5]) == "ab"


def test_a_token_without_a_row_is_refused_only_when_needed(tmp_path):
    tokenizer = Tokenizer.open(write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}), vocab_size=7)
    assert tokenizer.encode("ab") == [1, 4, 5]
    with pytest.raises(RequestError, match=r"<\|im_end\|>.*vocab_size 7, got 7"):
        tokenizer.encode("a<|im_end|>")


def test_a_token_without_a_row_is_found_wherever_its_id_comes_from(tmp_path):
    """Neither the count of the tokens nor one file alone tells the largest id."""
    content = tokenizer_json()
    content["model"]["vocab"]["c"] = 999
    rows = len(VOCAB) + 2
    tokenizer = Tokenizer.open(write(tmp_path, content, added_tokens={"<x>": len(VOCAB) + 1}), vocab_size=rows)
    assert tokenizer.vocab_size == rows
    with pytest.raises(RequestError, match="'c'.*got 999"):
        tokenizer.encode("ac")
    few = Tokenizer.open(write(tmp_path, tokenizer_json(), added_tokens={"<x>": len(VOCAB)}), vocab_size=len(VOCAB))
    with pytest.raises(RequestError, match="'<x>'"):
        few.encode("a<x>")


def test_a_prompt_is_not_searched_for_tokens_without_a_row_where_all_have_one(tmp_path, monkeypatch):
    """The search would keep every other thread waiting."""
    tokenizer = Tokenizer.open(write(tmp_path), vocab_size=len(VOCAB))
    monkeypatch.setattr("cpmrt.text.tokenizer.max", None, raising=False)
    assert tokenizer.encode("ab") == [1, 4, 5]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, b"bytes", ["a"], 3])
def test_malformed_text(tmp_path, text):
    with pytest.raises(RequestError, match="text to encode"):
        Tokenizer.open(write(tmp_path)).encode(text)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], [None]])
def test_malformed_ids(tmp_path, ids):
    with pytest.raises(RequestError, match="token id"):
        Tokenizer.open(write(tmp_path)).decode(ids)


MALFORMED = [
    ({"tokenizer": ""}, "tokenizer.json is not valid JSON"),
    ({"tokenizer": "[]"}, "expected a JSON object"),
    ({"tokenizer": {}}, "tokenizer.json: model: expected an object"),
    ({"tokenizer": "{" * 5000}, "tokenizer.json"),
    ({"tokenizer": '{"a":' * 50_000}, "tokenizer.json"),
    ({"tokenizer": tokenizer_json() | {"model": {"type": "Nothing"}}}, "tokenizer.json cannot be read"),
    ({"tokenizer": tokenizer_json() | {"decoder": {"type": "Nothing"}}}, "decoder: type of a component"),
    ({"tokenizer": tokenizer_json() | {"added_tokens": [added(999, "<new>")]}}, "'<new>': expected the id 264"),
    ({"tokenizer_config": "{"}, "tokenizer_config.json is not valid JSON"),
    ({"tokenizer_config": {"bos_token": 1}}, "bos_token: expected a token"),
    ({"tokenizer_config": {"bos_token": {"text": "<s>"}}}, "bos_token: expected a token"),
    ({"tokenizer_config": {"bos_token": "<bos>"}}, "'<bos>' is not a token"),
    ({"tokenizer_config": {"eos_token": "<eos>"}}, "'<eos>' is not a token"),
    ({"tokenizer_config": {"add_bos_token": "yes"}}, "expected true or false, got 'yes'"),
    ({"tokenizer_config": {"add_bos_token": True}}, "bos_token is not set"),
    ({"tokenizer_config": {"additional_special_tokens": "<x>"}}, "expected a list"),
    ({"tokenizer_config": {"added_tokens_decoder": []}}, "expected an object"),
    ({"tokenizer_config": {"added_tokens_decoder": {"x": {"content": "a"}}}}, "token ids as keys"),
    ({"tokenizer_config": {"added_tokens_decoder": {"7": {}}}}, "expected a token"),
    ({"tokenizer_config": {"added_tokens_decoder": {"4": {"content": "<s>"}}}}, "'<s>': expected the id 1"),
    ({"tokenizer_config": {"added_tokens_decoder": {"4000000000": {"content": "<z>"}}}}, "expected the id 264"),
    ({"added_tokens": {"<z>": 5}}, "added_tokens.json: added token '<z>'"),
    ({"added_tokens": {"<z>": "5"}}, "expected a token and its id"),
    ({"added_tokens": {"<z>": -5}}, "added token '<z>'"),
    ({"special_tokens_map": []}, "expected a JSON object"),
    ({"special_tokens_map": {"bos_token": []}}, "expected a token"),
]


@pytest.mark.parametrize(("files", "message"), MALFORMED)
def test_malformed_files(tmp_path, files, message):
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.open(write(tmp_path, files.get("tokenizer"), **{k: v for k, v in files.items() if k != "tokenizer"}))
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_say_the_way_out(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; copy it"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"LlamaTokenizerFast.*save_pretrained"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        Tokenizer.open(tmp_path)


def paths(value, prefix=()):
    """Yield the path of every value in a JSON document, the vocabulary left out."""
    yield prefix
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, item in items:
        if key != "vocab":
            yield from paths(item, (*prefix, key))


PATHS = [path for path in paths(tokenizer_json()) if path]
junk = st.sampled_from([None, True, -1, 0, 2**40, 1.5, "", "x", "\x00", [], {}, [[]], {"type": "BPE"}, "<s>"])


@examples(100)
@given(st.sampled_from(PATHS), junk, st.booleans())
def test_only_our_errors_come_out_of_mutated_files(tmp_path, path, value, remove):
    content = tokenizer_json()
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if remove:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    try:
        tokenizer = Tokenizer.open(write(tmp_path, content, tokenizer_config=BOS))
        tokenizer.decode(tokenizer.encode("ab </s> \u4f60"))
    except CpmrtError as error:
        assert "\n" not in str(error)


@examples(100)
@given(st.integers(0, 4000), st.binary(max_size=3))
def test_only_our_errors_come_out_of_damaged_bytes(tmp_path, position, patch):
    raw = json.dumps(tokenizer_json()).encode()
    (tmp_path / "tokenizer.json").write_bytes(raw[:position] + patch + raw[position + len(patch) :])
    try:
        Tokenizer.open(tmp_path).encode("ab")
    except CheckpointError as error:
        assert "tokenizer.json" in str(error)


def test_minicpm_files(tmp_path):
    if not (DATA / "minicpm3_tokenizer.json").exists():
        pytest.skip("no shared data")
    shutil.copy(DATA / "minicpm3_tokenizer.json", tmp_path / "tokenizer.json")
    shutil.copy(DATA / "minicpm4_tokenizer_config.json", tmp_path / "tokenizer_config.json")
    tokenizer = Tokenizer.open(tmp_path, vocab_size=73448)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (73440,), 73448)
    ids = tokenizer.encode("<|im_start|>user\n你好<|im_end|>\n")
    assert ids == [1, 73441, 3060, 5, 23523, 73440, 59320, 5]
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")


def test_a_prompt_may_be_as_long_as_its_limit(tmp_path):
    """A text is refused unencoded only if it is too long for prompts of the longest tokens, added ones among them."""
    limit = PromptLimit(4, longest_token=3)
    limit.check_bytes(12)
    limit.check_tokens(4)
    for check, number in ((limit.check_bytes, 13), (limit.check_tokens, 5)):
        with pytest.raises(ContextLengthError):
            check(number)
    content = tokenizer_json(with_bos=False)
    content["added_tokens"].append(added(len(content["model"]["vocab"]), long := "<a token of more bytes than others>"))
    assert len(Tokenizer.open(write(tmp_path, content)).encode(long * 4, max_tokens=4)) == 4
