"""tools/eval_sparse.py and the text of the long demo model: statements, haystacks, divergences, attention mass."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_checkpoint import write_checkpoint
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import eval_sparse
from demo_model.retrieval import CELL, TOKENS_PER_PAIR, VALUE_WORDS, Statements, retrieval_rows, spread_positions
from sparse_evaluation.attention_mass import MassProbe, Shares, block_mass, shares, summary
from sparse_evaluation.likelihood import Predictions, divergences, predictions
from sparse_evaluation.needles import DEPTHS, HeldOutText, found, logit_chunks, make_haystack
from sparse_evaluation.neighbours import ChoiceProbe, chance, unions
from sparse_evaluation.tables import ALWAYS_SPARSE, SETTINGS, Setting, plot_needles, tables

from cpmrt import LLM
from cpmrt.config import SparseConfig
from cpmrt.engine.loan import Loan
from cpmrt.reference.sparse_attention import choose_blocks

TOKENIZER = Tokenizer.from_file(str(Path(__file__).resolve().parents[2] / "cpmrt/assets/demo/tokenizer.json"))
TEXT = np.full(20_000, 300)
"""Text of one token that no statement has."""
FOUR_BLOCKS = Setting("four blocks", {"init_blocks": 1, "window_size": 64, "topk": 3, "dense_len": -1})


@pytest.fixture(scope="module")
def statements():
    return Statements.of(TOKENIZER)


def runs(row, length, opening):
    """Return the positions at which statements begin, found by their first tokens."""
    return [at for at in range(len(row) - length + 1) if tuple(row[at : at + len(opening)]) == opening]


def test_a_statement_is_a_line_of_words(statements):
    drawn = statements.draw(50, np.random.default_rng(0))
    assert drawn.shape == (50, statements.length)
    lines = [TOKENIZER.decode(row.tolist(), skip_special_tokens=False) for row in drawn]
    assert [TOKENIZER.encode(line, add_special_tokens=False).ids for line in lines] == drawn.tolist()
    for line in lines:
        key, values = line.removeprefix("\n# ").split(" -> ")
        assert len(key.split()) == 2 and len(values.split()) == VALUE_WORDS


def test_no_key_twice():
    few = Statements((7, 8), 9, np.arange(20, 26))
    drawn = few.draw(36, np.random.default_rng(0))
    assert len({tuple(row[2:4]) for row in drawn.tolist()}) == 36


def test_a_tokenizer_without_words_is_refused():
    class NoWords:
        def encode(self, text, add_special_tokens):
            return SimpleNamespace(ids=[1])

        def get_vocab(self):
            return {"a": 0, "1": 1}

    with pytest.raises(ValueError, match="whole words"):
        Statements.of(NoWords())


def test_rows_ask_for_what_they_said_before(statements):
    rows = retrieval_rows(TEXT, statements, 5, 1024, np.random.default_rng(3))
    assert rows.tokens.shape == (5, 1025) and (rows.tokens[:, 0] == 1).all()
    for tokens, is_text, is_answer in zip(rows.tokens, rows.is_text, rows.is_answer, strict=True):
        first = {}
        marked = np.zeros(1025, bool)
        covered = np.zeros(1025, bool)
        starts = runs(tokens, statements.length, statements.opening)
        assert len(starts) == 2 * (1024 // TOKENS_PER_PAIR)
        for at in starts:
            statement = tuple(tokens[at : at + statements.length])
            covered[at : at + statements.length] = True
            question = statement[: statements.question_length]
            if question in first:
                assert statement == first[question]
                marked[at + statements.question_length : at + statements.length] = True
            first[question] = statement
        assert len(first) == len(starts) // 2
        assert (is_answer == marked[1:]).all() and (is_text == ~covered[1:]).all()
        assert (tokens[1:][is_text] == TEXT[0]).all()


@pytest.mark.parametrize("length", [64, 1000, 65_536])
def test_spread_positions_grow_below_their_reach(length):
    rng = np.random.default_rng(0)
    for _ in range(20):
        positions = spread_positions(length, 65_536, rng)
        assert positions.shape == (length,) and positions[0] >= 0 and positions[-1] < 65_536
        assert (np.diff(positions) >= 1).all() and (np.diff(positions) > 1).sum() <= 6


@pytest.mark.parametrize(("length", "per_depth"), [(1024, 1), (4096, 4)])
def test_a_haystack_hides_statements_at_their_depths(statements, length, per_depth):
    haystack = make_haystack(TEXT, statements, length, per_depth, 1, np.random.default_rng(1))
    count = DEPTHS * per_depth
    body = length - count * statements.length
    starts = runs(haystack.token_ids, statements.length, statements.opening)
    assert len(haystack.token_ids) == length and len(starts) == 2 * count and haystack.token_ids[0] == 1
    place = {tuple(haystack.token_ids[at : at + statements.length]): at for at in starts if at < body}
    assert len(place) == count and np.bincount(haystack.depths).tolist() == [per_depth] * DEPTHS
    for answers, depth in zip(haystack.answers, haystack.depths, strict=True):
        last = int(answers[-1]) + 1
        hidden = place[tuple(haystack.token_ids[last - statements.length : last])]
        assert abs((hidden - 1) / body - (depth + 0.5) / DEPTHS) <= 0.5 / DEPTHS + CELL / body


def test_a_haystack_needs_room(statements):
    with pytest.raises(ValueError, match="no room"):
        make_haystack(TEXT, statements, 512, 4, 1, np.random.default_rng(1))
    with pytest.raises(ValueError, match="no room"):
        make_haystack(TEXT[:100], statements, 4096, 1, 1, np.random.default_rng(1))


class Oracle:
    """Stand-in for an LLM that predicts the next token right except at `wrong` positions, in chunks of 100 tokens."""

    def __init__(self, wrong=()):
        self.wrong, self.engine, self.executor = set(wrong), self, self

    def borrow(self, count):
        return Loan(count, slot=0)

    def give_back(self, loan):
        assert loan.slot == 0

    def prompt_logits(self, slot, token_ids, block_table):
        for start in range(0, len(token_ids), 100):
            following = [*token_ids[start + 1 : start + 101], 0][: len(token_ids[start : start + 100])]
            logits = np.zeros((len(following), 4096), np.float32)
            for row, token in enumerate(following):
                logits[row, (token + (start + row in self.wrong)) % 4096] = 20
            yield logits


def test_only_whole_answers_count(statements):
    haystack = make_haystack(TEXT, statements, 1024, 2, 1, np.random.default_rng(5))
    assert found(Oracle(), haystack).all()
    wrong = [int(haystack.answers[3, 0]) - 1, int(haystack.answers[11, 2]) - 1, int(haystack.answers[7, 2])]
    assert np.flatnonzero(~found(Oracle(wrong), haystack)).tolist() == [3, 11]


def test_divergences_are_means_by_position():
    rng = np.random.default_rng(0)
    windows = [rng.integers(9, size=40), rng.integers(9, size=40)]

    def drawn():
        logits = rng.normal(size=(13, 9))
        return Predictions(np.arange(2, 39, 3), np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True)))

    dense, ours = [drawn(), drawn()], [drawn(), drawn()]
    result = divergences(windows, dense, ours, [0, 10, 30, 40, 50])
    assert [(each.low, each.high, each.count) for each in result] == [(0, 10, 6), (10, 30, 14), (30, 40, 6)]
    losses, kls, same = [], [], []
    for window, theirs, own in zip(windows, dense, ours, strict=True):
        for row, position in enumerate(range(2, 39, 3)):
            if 10 <= position < 30:
                p, q = np.exp(theirs.log_probs[row]), np.exp(own.log_probs[row])
                losses.append(-np.log(q[window[position + 1]]))
                kls.append(float((p * np.log(p / q)).sum()))
                same.append(p.argmax() == q.argmax())
    assert (result[1].loss, result[1].kl) == pytest.approx((np.mean(losses), np.mean(kls)))
    assert result[1].agreement == pytest.approx(np.mean(same))


def test_predictions_of_every_other_position():
    window = np.arange(250) % 50
    taken = predictions(Oracle(), window, 3)
    assert taken.positions.tolist() == list(range(2, 249, 3))
    assert (taken.log_probs.argmax(axis=1) == window[taken.positions + 1]).all()


def test_windows_begin_with_bos_and_do_not_overlap():
    text = HeldOutText(np.arange(100, 200), 1, "")
    windows = text.windows(3, 21)
    assert [window[0] for window in windows] == [1, 1, 1] and all(len(window) == 21 for window in windows)
    tokens = np.concatenate([window[1:] for window in windows])
    assert len(set(tokens.tolist())) == 60 and (np.diff(windows[1][1:]) == 1).all()
    assert len(text.windows(9, 60)) == 1


def test_shares_against_a_mask_of_tokens():
    rng, config = np.random.default_rng(2), SparseConfig(init_blocks=1, window_size=64, topk=4, dense_len=-1)
    position, scale = 64 * 9 + 20, 0.3
    groups = rng.normal(size=(2, 3, 8)).astype(np.float32)
    keys = rng.normal(size=(2, position + 1, 8)).astype(np.float32)
    scores = rng.random((2, 9)).astype(np.float32)
    share = shares(block_mass(groups, keys, scale), scores, position, config)
    for head in range(2):
        kept = np.isin(np.arange(position + 1) // 64, choose_blocks(scores, position, config)[head])
        weights = np.exp(np.float64(scale) * groups[head] @ keys[head].T)
        expected = (weights * kept).sum(1) / weights.sum(1)
        np.testing.assert_allclose(share.chosen[head], expected, rtol=1e-5)
        by_block = [(weights / weights.sum(1, keepdims=True))[:, 64 * b : 64 * b + 64].sum() for b in range(10)]
        best = sum(sorted(by_block[1:8])[-2:]) + by_block[0] + by_block[8] + by_block[9]
        assert share.best[head].sum() == pytest.approx(best, rel=1e-5)


def test_the_summary_is_over_rows_layers_and_heads():
    low, high = (Shares(np.full((2, 4), value, np.float32), np.ones((2, 4), np.float32)) for value in (0.5, 1.0))
    figures = summary({0: [high, high], 1: [low, high]})
    assert figures["rows"] == 2 and figures["mean"] == 0.875 and figures["layer"] == 0.75
    assert figures["tenth"] == 0.5 and figures["best_mean"] == 1.0
    assert summary({}) == {}


def test_the_probe_leaves_attention_dense_and_sees_every_layer(tmp_path):
    write_checkpoint(tmp_path)
    ids = [1, *np.random.default_rng(0).integers(3, 259, size=520).tolist()]
    settings = [SparseConfig(window_size=64, topk=3, dense_len=-1), SparseConfig(window_size=64, topk=99)]
    with LLM(tmp_path, executor="reference", sparse="off", max_context=521, prefill_chunk=256) as llm:
        expected, layers = llm.logits(ids), llm.config.num_layers
    with LLM(tmp_path, executor="reference", sparse=ALWAYS_SPARSE.sparse, max_context=521, prefill_chunk=256) as llm:
        assert not np.array_equal(llm.logits(ids), expected)
        probe = MassProbe.attached(llm, settings, range(63, 521, 64))
        assert np.array_equal(llm.logits(ids), expected)
    assert list(probe.shares) == [0] and sorted(probe.shares[0]) == list(range(layers))
    for rows in probe.shares[0].values():
        assert len(rows) == 4  # positions 319, 383, 447, 511: before them four blocks hold everything
        assert all((row.chosen > 0).all() and (row.chosen <= row.best.sum(axis=1).max() + 1e-5).all() for row in rows)
        assert all((row.chosen.sum(axis=1) <= row.best.sum(axis=1) + 1e-5).all() for row in rows)


def test_unions_are_those_of_sets():
    blocks = np.random.default_rng(4).integers(30, size=(19, 2, 5)).astype(np.int32)
    for together in (1, 4, 16):
        firsts = range(0, 19 - together + 1, together)
        expected = [
            np.mean([len(set(blocks[first : first + together, head].ravel())) for first in firsts]) for head in range(2)
        ]
        np.testing.assert_allclose(unions(blocks, together), expected)


def test_chance_is_what_random_scores_give():
    config, rng = SparseConfig(window_size=128, topk=8, dense_len=-1), np.random.default_rng(5)
    position = 64 * 40 + 63
    rows = [choose_blocks(rng.random((1, 40)).astype(np.float32), position, config) for _ in range(4000)]
    for together in (1, 4, 12):
        assert unions(np.stack(rows), together)[0] == pytest.approx(chance(position, together, config), rel=0.01)


def test_the_probe_of_choices_changes_nothing_and_keeps_the_wanted_chunks(tmp_path):
    write_checkpoint(tmp_path)
    ids = [1, *np.random.default_rng(0).integers(3, 259, size=700).tolist()]
    config = FOUR_BLOCKS.config
    assert config is not None and config.num_selected == 4
    with LLM(tmp_path, executor="reference", sparse=FOUR_BLOCKS.sparse, max_context=701, prefill_chunk=128) as llm:
        expected, layers, heads = llm.logits(ids), llm.config.num_layers, llm.config.attention.num_kv_heads
        probe = ChoiceProbe(llm, 128, (256, 512))
        assert np.array_equal(np.concatenate([logits for _, logits in logit_chunks(llm, ids)]), expected)
    assert sorted(probe.choices) == [256, 512]
    for first, choices in probe.choices.items():
        own = np.arange(first, first + 128) // 64
        assert [blocks.shape for blocks in choices] == [(128, heads, config.num_selected)] * layers
        for blocks in choices:
            assert (blocks[:, :, -1] == own[:, None]).all() and (np.diff(blocks, axis=2) > 0).all()
    assert not np.array_equal(probe.choices[512][0], probe.choices[512][1])


def test_the_part_unions_measures_ends_of_lengths(tmp_path, monkeypatch):
    write_checkpoint(tmp_path)
    monkeypatch.setattr(eval_sparse, "CHUNK", 128)
    evaluation = eval_sparse.SparseEvaluation.__new__(eval_sparse.SparseEvaluation)
    evaluation.model, evaluation.lengths = tmp_path, (128, 384, 640)
    evaluation.options = SimpleNamespace(executor="reference")
    evaluation.text = HeldOutText(np.random.default_rng(1).integers(3, 259, size=2000), 1, "")
    part = evaluation._unions(FOUR_BLOCKS)
    assert list(part) == ["384", "640"], "before 256 nothing is left out"
    for row in part.values():
        assert list(row) == ["4", "8", "12", "16"]
        sizes = np.array([row[count]["unions"] for count in ("4", "8", "16")])
        assert (np.diff(sizes, axis=0) >= 0).all() and (sizes >= 4).all()
    (lines,) = tables({"unions": part})
    assert lines.splitlines()[-1].startswith("| 640 | ") and lines.count("(") == 8


def test_settings_say_how_many_blocks():
    assert [(setting.label, setting.budget) for setting in SETTINGS] == [
        ("dense", "all"), ("official", "96 (62)"), ("CPM.cu, command line", "72 (62)"),
        ("CPM.cu, Python class", "64 (30)"), ("a half", "48 (30)"), ("a quarter", "24 (14)"), ("an eighth", "12 (6)"),
    ]  # fmt: skip


def test_results_add_up_in_one_file_and_give_tables(tmp_path):
    span = {"low": 0, "high": 1024, "count": 7, "loss": 0.7, "kl": 0.0123, "agreement": 0.9, "perplexity": 2.0137}
    figures = {"rows": 3, "mean": 0.9, "tenth": 0.8, "layer": 0.85}
    figures |= {"best_mean": 0.95, "best_tenth": 0.9, "best_layer": 0.9}
    row = {"budget": "96 (62)", "grid": {"1024": [1.0, 0.5]}, "decoded": {"asked": 4, "same": 3}}
    needles = {"lengths": [1024], "questions": 8, "settings": {"official": row}}
    mass = {"length": 512, "settings": {"official": figures, "an eighth": {}}}
    spans = {"windows": 1, "length": 1024, "provenance": "p", "settings": {"official": [span]}}
    for part in ({"needles": needles}, {"mass": mass}, {"text": spans}, {"asked": mass}):
        text = eval_sparse.store(tmp_path, {"model": "m"}, part)
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"model", "needles", "mass", "text", "asked"}
    assert (tmp_path / "tables.md").read_text() == text
    for line in (
        "| official | 96 (62) | 75.0 |", "Of 4 questions asked again by decoding, 3 gave the same.",
        "| official | 2.014; 12.30; 90.0 % |", "| official | 3 | 90.0 (95.0) | 80.0 (90.0) | 85.0 (90.0) |",
        "| an eighth | 0 | - | - | - |",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert len(list(tables(json.loads((tmp_path / "results.json").read_text())))) == 4


def test_the_plot_is_small(tmp_path):
    pytest.importorskip("matplotlib")

    grid = {str(length): np.linspace(0, 1, DEPTHS).tolist() for length in (4096, 65536)}
    rows = {setting.label: {"budget": setting.budget, "grid": grid} for setting in SETTINGS}
    plot_needles({"lengths": [4096, 65536], "settings": rows}, tmp_path / "needles.png")
    picture = (tmp_path / "needles.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and 5_000 < len(picture) < 150_000
