"""The tokenizer and the chat template of a folder are the same from a GGUF file made of it."""

import json
import shutil

import gguf_models as models
import pytest
from gguf_tokenizers import DATA, SPLITTERS, texts, trained
from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers import Tokenizer as Library
from tokenizers import models as library_models

from cpmrt.errors import UnsupportedModelError
from cpmrt.quantization.gguf_conversion import to_gguf
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.weights.model_folder import ModelFolder


def small(tmp_path, tokenizer, vocab_size=1600, **settings):
    """Write a small model with this tokenizer.json and return its folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    pair = models.write_pair(
        tmp_path, "llama", lambda name: "F32", num_hidden_layers=1, head_dim=32, vocab_size=vocab_size,
        tie_word_embeddings=True, **sizes,
    )  # fmt: skip
    (pair.folder / "tokenizer.json").write_text(tokenizer)
    (pair.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return pair.folder


@pytest.mark.all
@pytest.mark.skipif(not DATA.exists(), reason="needs the tokenizers beside the project")
def test_sentence_piece_needs_no_second_copy(tmp_path):
    folder = small(tmp_path, (DATA / "minicpm3_tokenizer.json").read_text(), 73448)
    shutil.copy(DATA / "minicpm4_tokenizer_config.json", folder / "tokenizer_config.json")
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=False)


@pytest.mark.parametrize("pre", SPLITTERS)
def test_byte_pairs_need_no_second_copy_where_their_words_have_a_name(tmp_path, pre):
    folder = small(tmp_path, trained(**SPLITTERS[pre]).to_str(), eos_token="<|im_end|>")
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=False)


def test_a_tokenizer_that_has_no_name_comes_as_a_whole(tmp_path, caplog):
    folder = small(tmp_path, trained(("x+",)).to_str())
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=True)
    assert "no key of GGUF says its pre_tokenizer: " in caplog.text


def _with_flag(name):
    return lambda library: library.add_special_tokens([AddedToken("<|im_end|>", special=True, **{name: True})])


def _with_flag_of_the_normalizer(library):
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken("<|im_end|>", normalized=True, special=True)])


def _with_an_end(library):
    end = library.token_to_id("<|im_end|>")
    library.post_processor = processors.TemplateProcessing("$A <|im_end|>", special_tokens=[("<|im_end|>", end)])


def _with_a_decoder(library):
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])


@pytest.mark.parametrize(("change", "part"), [
    *((_with_flag(name), "added_tokens") for name in ("lstrip", "rstrip", "single_word")),
    (_with_flag_of_the_normalizer, "added_tokens"), (_with_an_end, "post_processor"), (_with_a_decoder, "decoder"),
])  # fmt: skip
def test_a_tokenizer_of_which_a_part_has_no_key_comes_as_a_whole(tmp_path, caplog, change, part):
    name = "qwen2" if change is _with_flag_of_the_normalizer else "gpt-2"
    library = trained(**SPLITTERS[name])
    change(library)
    folder = small(tmp_path, library.to_str())
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=True)
    assert f"no key of GGUF says its {part}: " in caplog.text


def test_what_makes_no_difference_needs_no_second_copy(tmp_path, caplog):
    """No second copy of tokenizer.json is stored for a BOS of the post-processor, which has a key, or unused
    settings."""
    library = trained(**SPLITTERS["gpt-2"])
    start = library.token_to_id("<|im_start|>")
    front = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), front])
    library.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    library.add_tokens([AddedToken("<tool>", normalized=True)])
    folder = small(tmp_path, library.to_str(), bos_token="<|im_start|>")
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=False)
    assert not caplog.records and Tokenizer.open(tmp_path / "made.gguf").encode("a")[0] == start


@pytest.mark.parametrize("name", ["gpt-2", "none"])
def test_tokens_that_other_files_add_come_along(tmp_path, name):
    """Tokens added by other files are in the GGUF file, whether it has tokenizer keys only or all of tokenizer.json."""
    library = trained(**SPLITTERS.get(name, {"pattern": ("x+",)}))
    size = library.get_vocab_size()
    named = {"eos_token": "<|end|>", "added_tokens_decoder": {str(size): {"content": "<|end|>", "special": True}}}
    folder = small(tmp_path, library.to_str(), **named)
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": size + 1}))
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    _same_tokenizer(folder, tmp_path / "made.gguf", whole=name == "none")
    found = Tokenizer.open(tmp_path / "made.gguf")
    assert found.encode("<|end|><tool>") == [size, size + 1] and found.special_ids >= {size}


@pytest.mark.parametrize("model", [
    library_models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0), library_models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"),
    library_models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>"),
])  # fmt: skip
def test_a_tokenizer_that_is_no_bpe_is_refused(tmp_path, model):
    folder = small(tmp_path, Library(model).to_str())
    kind = type(model).__name__
    with pytest.raises(UnsupportedModelError, match=f"tokenizer.json: expected one of type BPE, got {kind}; use the"):
        to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    assert not (tmp_path / "made.gguf").exists()


@pytest.mark.parametrize(("jinja", "own", "value"), [
    (None, None, "of the config"), (None, {"chat_template": "of its json"}, "of the config"),
    ("of jinja", {"chat_template": "of its json"}, "of the config"), (None, {}, {"name": "default", "template": "one"}),
    (None, None, [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b {{ tools }}"}]),
    (None, None, None),
])  # fmt: skip
def test_the_chat_template_is_the_one_that_the_folder_opens_with(tmp_path, jinja, own, value):
    folder = small(tmp_path, trained(**SPLITTERS["gpt-2"]).to_str(), chat_template=value)
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    if own is not None:
        (folder / "chat_template.json").write_text(json.dumps(own))
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    expected, found = ChatTemplate.open(folder), ChatTemplate.open(tmp_path / "made.gguf")
    if expected is None or found is None:
        assert expected is found and value is None
    else:
        assert (found.source, found.text) == (expected.source, expected.text)


@pytest.mark.parametrize(("own", "more", "num_lost"), [
    (True, ["<A>"], 0), (True, ["<A>", "<B>"], 0), (False, ["<A>", "<B>"], 0),
    (True, ["<|im_end|>", "<A>", "<|im_start|>"], 0),  # the first is known by its text
    (True, ["<A>", "<B>", "<C>", "<D>"], 2), (True, ["a", "b"], 0),
])  # fmt: skip
def test_every_token_that_ends_an_answer_does(tmp_path, caplog, own, more, num_lost):
    """Every token that ends an answer is in the file, up to GGUF's 3 keys; with `own` the tokenizer names </s> as its
    end."""
    library = trained(**SPLITTERS["gpt-2"])
    library.add_special_tokens(["</s>", *(text for text in more if text.startswith("<"))])
    ends = [library.token_to_id(text) for text in ("</s>", *more)]
    folder = small(tmp_path, library.to_str(), **({"eos_token": "</s>"} if own else {}))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    to_gguf(ModelFolder.open(folder), tmp_path / "made.gguf", "q8_0")
    found = ModelFolder.open(tmp_path / "made.gguf").config.eos_token_ids
    lost = set(ends[len(ends) - num_lost :])
    assert set(ends) - set(found) == lost and set(found) <= {*ends, library.token_to_id("<|im_end|>")}
    assert Tokenizer.open(tmp_path / "made.gguf").eos_token_ids == ((ends[0],) if own else (min(ends),))
    assert ("GGUF has only 3 keys for ends" in caplog.text) == bool(lost)
    assert all(str(token_id) in caplog.text for token_id in lost)


def _same_tokenizer(folder, made, *, whole):
    assert (b"tokenizer.huggingface.json" in made.read_bytes()) == whole
    found, expected = Tokenizer.open(made), Tokenizer.open(folder)
    for text in texts(["<|im_end|>", "<|im_start|>"], 300):
        ids = expected.encode(text)
        assert found.encode(text) == ids and found.decode(ids) == expected.decode(ids), text
    assert found.eos_token_ids == expected.eos_token_ids and found.bos_token_id == expected.bos_token_id
    assert (ChatTemplate.open(made) is None) == (ChatTemplate.open(folder) is None)
