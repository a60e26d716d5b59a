"""`draft` and `speculate` as arguments of LLM and as options of the command line: the settings that they give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpmrt.cli.arguments import add_draft_options, draft_arguments
from cpmrt.cli.parser import Parser
from cpmrt.config import EngineConfig, SpeculationConfig, TreeShape
from cpmrt.config.speculate_argument import named_drafts, read_speculation
from cpmrt.config.speculation import DRAFT_METHODS, InnerDraft
from cpmrt.errors import ConfigError


def read(draft, speculate, method="eagle2"):
    return read_speculation(draft, speculate, lambda inner: method)


def not_asked(inner):
    pytest.fail("there is no draft to look into")


@pytest.mark.parametrize("speculate", ["auto", "off"])
def test_nothing_without_a_draft(speculate):
    assert read_speculation(None, speculate, not_asked) is None


def test_off_leaves_the_draft_out():
    assert read_speculation("folder", "off", not_asked) is None


@pytest.mark.parametrize("method", ["eagle2", "eagle3", "dspark", "model"])
def test_auto_takes_the_shapes_of_the_drafts_method(method):
    assert read("folder", "auto", method) == SpeculationConfig(method, DRAFT_METHODS[method].shapes, is_adaptive=True)


@pytest.mark.parametrize(("draft", "speculate"), [
    ("lookup", "auto"), ("lookup", {}), (None, {"method": "lookup"}), ("lookup", {"method": "lookup"}),
])  # fmt: skip
def test_lookup_needs_no_files(draft, speculate):
    assert read_speculation(draft, speculate, not_asked) == SpeculationConfig("lookup", DRAFT_METHODS["lookup"].shapes)


def test_the_default_shapes():
    assert DRAFT_METHODS["eagle2"].shapes[0] == DRAFT_METHODS["eagle3"].shapes[0] == TreeShape(2, 10, 12)
    for method in ("model", "lookup"):
        assert {shape.num_passes for shape in DRAFT_METHODS[method].shapes} == {3, 5, 8}
    for name, method in DRAFT_METHODS.items():
        SpeculationConfig(name, method.shapes)
        assert len(set(method.shapes)) == len(method.shapes)
    assert {name for name, method in DRAFT_METHODS.items() if method.drafts_chains} == {"dspark", "model", "lookup"}


@pytest.mark.parametrize(("method", "wishes", "shape"), [
    ("eagle2", {"num_passes": 4, "top_k": 10, "tree_size": 32}, TreeShape(4, 10, 32)),
    ("eagle2", {"num_passes": 3}, TreeShape(3, 10, 12)),
    ("eagle3", {"tree_size": 24}, TreeShape(2, 10, 24)),
    ("eagle2", {"num_passes": 1, "top_k": 4}, TreeShape(1, 4, 5)),
    ("eagle2", {"num_passes": 5, "top_k": 1}, TreeShape.chain(5)),
    ("model", {"num_passes": 6}, TreeShape.chain(6)),
    ("model", {"tree_size": 5}, TreeShape.chain(4)),
    ("model", {"num_passes": 6, "top_k": 1, "tree_size": 4}, TreeShape(6, 1, 4)),
    ("model", {"top_k": 1}, TreeShape.chain(3)),
])  # fmt: skip
def test_one_tree_is_taken_always(method, wishes, shape):
    assert read("folder", wishes, method) == SpeculationConfig(method, (shape,), is_adaptive=False)
    assert read("folder", wishes | {"adaptive": True}, method).is_adaptive


def test_a_list_of_trees():
    found = read("folder", {"shapes": [(2, 10, 12), [1, 4, 5], TreeShape(3, 2, 6)]})
    assert found == SpeculationConfig("eagle2", (TreeShape(), TreeShape(1, 4, 5), TreeShape(3, 2, 6)))
    assert not read("folder", {"shapes": [(2, 10, 12)], "adaptive": False}).is_adaptive


def test_a_lookup_beside_every_tree():
    found = read("folder", {"lookup": 15})
    assert found.shapes == tuple(replace(shape, lookup_length=15) for shape in DRAFT_METHODS["eagle2"].shapes)
    assert found.is_adaptive
    found = read("folder", {"lookup": 8, "num_passes": 3}, "model")
    assert found == SpeculationConfig("model", (TreeShape(3, 1, 4, 8),), is_adaptive=False)


INNER_EAGLE = SpeculationConfig("eagle2", (TreeShape(),), is_adaptive=False)


@pytest.mark.parametrize(("wish", "expected"), [
    ("e", InnerDraft("e", INNER_EAGLE)),
    (Path("e"), InnerDraft("e", INNER_EAGLE)),
    ({"draft": "e"}, InnerDraft("e", INNER_EAGLE)),
    ({"draft": Path("e"), "num_passes": 1, "window": 9, "head_bits": 4},
     InnerDraft("e", SpeculationConfig("eagle2", (TreeShape(1, 10, 11),), is_adaptive=False, window=9, head_bits=4))),
    ({"draft": "e", "shapes": [(3, 2, 6)], "lookup": 5}, InnerDraft(
        "e", replace(INNER_EAGLE, shapes=(TreeShape(3, 2, 6, 5),)))),
    ("lookup", InnerDraft(None, SpeculationConfig("lookup", (TreeShape.chain(5),), is_adaptive=False))),
    ({"draft": "lookup", "num_passes": 3},
     InnerDraft(None, SpeculationConfig("lookup", (TreeShape.chain(3),), is_adaptive=False))),
])  # fmt: skip
def test_the_draft_of_a_small_model(wish, expected):
    methods = {None: "model", "e": "eagle2"}
    found = read_speculation("small", {"num_passes": 6, "inner": wish}, methods.__getitem__)
    assert found == SpeculationConfig("model", (TreeShape.chain(6),), is_adaptive=False, inner=expected)


@pytest.mark.parametrize(("wish", "message"), [
    (3, "speculate: inner: expected a folder, a hub id or lookup, or an object with one of these as draft, got 3"),
    ({"num_passes": 3}, "an object with one of these as draft"),
    ({"draft": "e", "inner": "e"}, "inner: inner means nothing to an inner draft; leave it out"),
    ({"draft": "e", "adaptive": True}, "inner: adaptive means nothing to an inner draft"),
    ({"draft": "e", "shapes": [(1, 4, 5), (2, 4, 5)]}, "inner: shapes: expected one tree shape, got 2"),
    ({"draft": "e", "simulate_accept": 2.0}, "inner: simulate_accept: expected nothing"),
    ({"draft": "lookup", "window": 3}, "window means nothing to method lookup"),
    ({"draft": "e", "depth": 3}, "unknown keys"),
])  # fmt: skip
def test_drafts_of_a_small_model_that_cannot_be(wish, message):
    methods = {None: "model", "e": "eagle2"}
    with pytest.raises(ConfigError, match=message):
        read_speculation("small", {"inner": wish}, methods.__getitem__)


@pytest.mark.parametrize("method", ["eagle2", "eagle3", "dspark"])
def test_only_a_small_model_has_a_draft_of_its_own(method):
    with pytest.raises(ConfigError, match=f"inner means nothing to method {method}"):
        read("d", {"inner": "lookup"}, method)


@pytest.mark.parametrize(("draft", "speculate", "names"), [
    (None, "auto", ()), ("lookup", {"inner": "e"}, ()), ("d", "off", ()), ("d", "auto", ("d",)),
    ("d", {"inner": "lookup"}, ("d",)), ("d", {"inner": "e"}, ("d", "e")), ("d", {"inner": {"draft": "e"}}, ("d", "e")),
])  # fmt: skip
def test_the_drafts_that_have_files(draft, speculate, names):
    assert named_drafts(draft, speculate) == names


@pytest.mark.parametrize("vocab", [32768, "some/freq_32768.json", Path("some/freq_32768.json")])
def test_what_concerns_the_draft_itself(vocab):
    found = read("folder", {"draft_vocab": vocab, "window": 1024, "head_bits": 4, "residual_scale": "cpmcu"})
    expected = str(vocab) if isinstance(vocab, Path) else vocab
    assert (found.draft_vocab, found.window, found.head_bits, found.residual_scale) == (expected, 1024, 4, "cpmcu")
    assert found.shapes == DRAFT_METHODS["eagle2"].shapes and found.is_adaptive


@pytest.mark.parametrize(("draft", "speculate", "message"), [
    ("d", "on", "expected auto | off | an object, got 'on'"),
    ("d", 3, "got 3"),
    (None, {}, "needs a draft"),
    (None, {"method": "model"}, "needs a draft"),
    ("d", {"depth": 3, "top_k": 2}, "unknown keys: expected .*num_passes.* got 'depth'"),
    ("d", {"method": "eagle3"}, "method: expected eagle2, as the draft is, got 'eagle3'"),
    ("d", {"method": "lookup"}, "method: expected eagle2"),
    ("lookup", {"method": "model"}, "method: expected lookup"),
    ("d", {"shapes": [(2, 10, 12)], "top_k": 3}, "shapes and top_k exclude each other"),
    ("d", {"shapes": "2,10,12"}, "a list of"),
    ("d", {"shapes": [(2, 10)]}, "a list of"),
    ("d", {"shapes": []}, "at least one tree shape"),
    ("d", {"shapes": [("2", 10, 12)]}, "num_passes"),
    ("d", {"num_passes": 0}, "num_passes"),
    ("d", {"num_passes": True}, "num_passes"),
    ("d", {"tree_size": 65}, "tree_size"),
    ("d", {"adaptive": "yes"}, "adaptive: expected true or false"),
    ("d", {"draft_vocab": 0}, "draft_vocab"),
    ("d", {"draft_vocab": ""}, "draft_vocab"),
    ("d", {"draft_vocab": 1.5}, "draft_vocab"),
    ("d", {"window": "1k"}, "window"),
    ("d", {"head_bits": 3}, "head_bits"),
    ("d", {"layer_bits": 2}, "layer_bits: expected 4 | 8, or nothing, got 2"),
    ("lookup", {"layer_bits": 4}, "layer_bits means nothing to method lookup"),
    ("d", {"residual_scale": "llama"}, "residual_scale"),
    (None, {"simulate_accept": 2.0}, "speculate needs a draft"),
    ("d", {"simulate_accept": 3.5}, r"a number in \[1, 3\]"),
    ("d", {"simulate_accept": 0.9}, "simulate_accept"),
    ("d", {"simulate_accept": "2"}, "simulate_accept"),
    ("d", {"min_confidence": 0.5}, "min_confidence means nothing to method eagle2"),
    *(("d", {"min_confidence": wrong}, r"min_confidence: expected a number in \[0, 1\]") for wrong in (1.5, "1", True)),
    ("d", {"simulate_accept": float("nan")}, "simulate_accept"),
    ("lookup", {"lookup": 5}, "lookup means nothing to method lookup"),
    ("d", {"lookup": 64}, "lookup"),
    ("d", {"lookup": True}, "lookup"),
    ("lookup", {"window": 5}, "window means nothing to method lookup"),
    ("lookup", {"top_k": 2}, "lookup drafts chains"),
    ("lookup", {"tree_size": 34}, r"speculate: tree_size: expected an integer in \[2, 33\], got 34"),
    ("lookup", {"tree_size": 1}, r"speculate: tree_size: .* got 1"),
])  # fmt: skip
def test_wishes_that_cannot_be(draft, speculate, message):
    with pytest.raises(ConfigError, match=message):
        read(draft, speculate)


@pytest.mark.parametrize(("method", "wishes"), [
    ("eagle3", {"draft_vocab": 99}), ("model", {"draft_vocab": 99}), ("model", {"window": 9}), ("model", {"top_k": 2}),
    ("dspark", {"window": 9}), ("dspark", {"top_k": 2}),
])  # fmt: skip
def test_wishes_that_the_method_cannot_fulfil(method, wishes):
    with pytest.raises(ConfigError, match=method):
        read("folder", wishes, method)


@pytest.mark.parametrize(("line", "expected"), [
    ("", {"draft": None, "speculate": "auto"}),
    ("--draft eagle2", {"draft": "eagle2", "speculate": "auto"}),
    ("--draft eagle2 --speculate off --tree-size 9", {"draft": "eagle2", "speculate": "off"}),
    ("--draft e --draft-iters 4 --draft-topk 8 --tree-size 24",
     {"draft": "e", "speculate": {"num_passes": 4, "top_k": 8, "tree_size": 24}}),
    ("--draft e --draft-iters 4 --speculate auto", {"draft": "e", "speculate": {"num_passes": 4, "adaptive": True}}),
    ("--draft e --draft-vocab 8192 --draft-window 512 --draft-head-bits 8",
     {"draft": "e", "speculate": {"draft_vocab": 8192, "window": 512, "head_bits": 8}}),
    ("--draft e --draft-lookup 15", {"draft": "e", "speculate": {"lookup": 15}}),
    ("--draft e --draft-inner lookup", {"draft": "e", "speculate": {"inner": "lookup"}}),
    ("--draft e --draft-min-confidence 0.5 --draft-layer-bits 4",
     {"draft": "e", "speculate": {"min_confidence": 0.5, "layer_bits": 4}}),
    ("--draft e --draft-vocab a/freq_9.json", {"draft": "e", "speculate": {"draft_vocab": "a/freq_9.json"}}),
])  # fmt: skip
def test_the_options_of_the_command_line(line, expected):
    parser = Parser(prog="cpmrt test")
    add_draft_options(parser)
    assert draft_arguments(parser.parse_args(line.split())) == expected


EAGLE = SpeculationConfig("eagle2")


@pytest.mark.parametrize(("settings", "message"), [
    ({"draft": "d"}, "draft: expected nothing, got 'd'"),
    ({"speculation": EAGLE}, "draft: expected a draft model"),
    ({"draft": "d", "speculation": SpeculationConfig("lookup", DRAFT_METHODS["lookup"].shapes)}, "expected nothing"),
])  # fmt: skip
def test_engine_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(("draft", "wish"), [
    (None, INNER_EAGLE), ("d", SpeculationConfig("lookup", (TreeShape.chain(3),))),
])  # fmt: skip
def test_an_inner_draft_and_its_method_belong_together(draft, wish):
    with pytest.raises(ConfigError, match="inner: expected a draft and its method"):
        InnerDraft(draft, wish)


def test_numbers_may_be_those_of_numpy():
    chain = (TreeShape.chain(3),)
    confidence = SpeculationConfig("dspark", chain, min_confidence=np.float32(0.5)).min_confidence
    accept = SpeculationConfig("dspark", chain, forced_accept=np.float64(2.5)).forced_accept
    assert (confidence, accept, type(confidence), type(accept)) == (0.5, 2.5, float, float)


def test_accept_lengths_up_to_what_the_tree_can_give():
    for accept in (1, 2.5, 3.0):
        assert read("d", {"simulate_accept": accept}).forced_accept == accept
