"""tools/gen_fr_index.py: counts against a plain count, files of any size in pieces, the special tokens, mistakes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import gen_fr_index
from gen_fr_index import main, pieces

from cpmrt.quantization.gguf_conversion import to_gguf
from cpmrt.text import Tokenizer
from cpmrt.weights.model_folder import ModelFolder
from cpmrt.weights.token_index import read_token_index

SPECIAL = {0, 1, 2}
TEXT = "the quick brown fox\njumps over the lazy dog, 世界\n" * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def by_frequency(checkpoint, *texts):
    tokenizer = Tokenizer.open(checkpoint)
    counts = Counter(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False))
    return sorted((token for token in range(259) if token not in SPECIAL), key=lambda token: (-counts[token], token))


def test_the_most_frequent_come_first_and_the_special_tokens_last(checkpoint, tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "deep" / "b.md").write_text("zzz qqqq")
    (folder / "ignored.bin").write_bytes(b"\xff" * 99)
    lines = [json.dumps({"text": text}) for text in ("uuuuu", "vv\ud800")]
    (tmp_path / "c.jsonl").write_text("\n".join([lines[0], "", lines[1]]))
    out = tmp_path / "draft"
    arguments = [str(checkpoint), str(folder), str(tmp_path / "c.jsonl"), "--sizes", "8,40,259", "--out", str(out)]
    assert main(arguments) == 0
    expected = by_frequency(checkpoint, TEXT, "zzz qqqq", "uuuuu", "vv?")
    for size in (8, 40, 259):
        ids = json.loads((out / f"freq_{size}.json").read_text())
        assert ids == expected[: size - 3] + [0, 1, 2]
        assert read_token_index(out / f"freq_{size}.json", 259) == tuple(ids)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and "100.00% of " in shown[2]


def test_a_gguf_file_has_the_same_list_as_the_folder_it_was_made_of(checkpoint, tmp_path):
    path = tmp_path / "model.gguf"
    to_gguf(ModelFolder.open(checkpoint), path, "bf16")
    (tmp_path / "a.txt").write_text(TEXT)
    for model in (checkpoint, path):
        assert main([str(model), str(tmp_path / "a.txt"), "--sizes", "40", "--out", str(tmp_path / model.stem)]) == 0
    first, second = ((tmp_path / model.stem / "freq_40.json").read_text() for model in (checkpoint, path))
    assert first == second


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_pieces_lose_nothing_and_end_at_lines(tmp_path, monkeypatch, size):
    monkeypatch.setattr(gen_fr_index, "_PIECE_BYTES", size)
    text = "".join(f"{'x' * (number % 50)}\n" for number in range(200)) + "no line break at the end"
    (tmp_path / "a.txt").write_text(text)
    found = list(pieces(tmp_path / "a.txt"))
    assert "".join(found) == text and len(found) > len(text) // (size + 50)
    assert size < 64 or all(piece.endswith("\n") for piece in found[:-1])


def test_pieces_do_not_show_in_the_counts(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    for size, at_a_time in ((1 << 16, 64), (40, 2)):
        monkeypatch.setattr(gen_fr_index, "_PIECE_BYTES", size)
        monkeypatch.setattr(gen_fr_index, "_PIECES_AT_A_TIME", at_a_time)
        assert main([str(checkpoint), str(tmp_path / "a.txt"), "--sizes", "30", "--out", str(tmp_path)]) == 0
        assert json.loads((tmp_path / "freq_30.json").read_text())[:27] == by_frequency(checkpoint, TEXT)[:27]


@pytest.mark.parametrize(("arguments", "says"), [
    (["absent.txt"], "absent.txt"),
    (["."], "has no text"),
    (["a.txt", "--sizes", "3"], "more than the 3 special tokens, at most the vocabulary's 259, got 3"),
    (["a.txt", "--sizes", "260"], "got 260"),
    (["empty.txt", "--sizes", "9"], "has no tokens"),
    (["bad.jsonl", "--sizes", "9"], 'line 2: expected a JSON object with "text"'),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_no_file(checkpoint, tmp_path, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    if arguments[0] != ".":
        for name, content in (("a.txt", "hello"), ("empty.txt", ""), ("bad.jsonl", '{"text": "x"}\n{"no": 1}\n')):
            Path(name).write_text(content)
    assert main([str(checkpoint), *arguments, *([] if "--sizes" in arguments else ["--sizes", "9"])]) == 1
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1
    assert not list(tmp_path.rglob("freq_*"))


@pytest.mark.parametrize("sizes", ["", "0", "4,", "-3", "x"])
def test_sizes_are_positive_numbers(checkpoint, sizes):
    with pytest.raises(SystemExit):
        main([str(checkpoint), "a.txt", f"--sizes={sizes}"])
