"""tools/compare_variants.py: how variants are written, and two of this tree on the NumPy executor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from tool_module import tool_module

ROOT = Path(__file__).resolve().parents[2]
compare_variants = tool_module("compare_variants")
CASE = ("demo", "--executor", "reference", "--case", "8:2", "--max-context", "64", "--repeats", "1")


@pytest.mark.parametrize(
    ("settings", "constants"),
    [
        ("", ()),
        (",cpmrt.a:_B=6", (("cpmrt.a:_B", 6),)),
        (",cpmrt.a:_B=(1, 32),c:D={1: 'x', 2: None}", (("cpmrt.a:_B", (1, 32)), ("c:D", {1: "x", 2: None}))),
    ],
)  # fmt: skip
def test_variants(settings: str, constants: tuple[Any, ...]) -> None:
    variant = compare_variants.parse_variant(f"six={ROOT}{settings}")
    assert (variant.label, variant.folder, variant.constants) == ("six", ROOT, constants)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (str(ROOT), "LABEL=FOLDER"), ("a=/nowhere", "cpmrt in the folder"), (f"a={ROOT},_B=1", "cpmrt in the folder"),
        (f"a={ROOT},cpmrt.a:=1", "MODULE:NAME=VALUE"), (f"a={ROOT},cpmrt.a:_B", "literal, got ''"),
        (f"a={ROOT},cpmrt.a:_B=six", "a Python literal, got 'six'"),
    ],
)  # fmt: skip
def test_mistakes_in_variants(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        compare_variants.parse_variant(text)


def test_the_table_is_of_medians_beside_the_first_variant() -> None:
    rounds = [[{"8:2:1": 100.0}, {"8:2:1": speed}] for speed in (110.0, 90.0, 120.0)]
    first, second = compare_variants.table(["before", "after"], rounds).splitlines()
    assert first.split() == ["8:2:1", "before", "100.0", "+0.00%", "100.0", "100.0", "100.0"]
    assert second.split() == ["8:2:1", "after", "110.0", "+10.00%", "110.0", "90.0", "120.0"]


def test_a_tree_with_two_values_of_a_constant(capsys: pytest.CaptureFixture[str]) -> None:
    variants = [f"base={ROOT}", f"one={ROOT},cpmrt.bench.measure:median=None"]
    with pytest.raises(SystemExit, match="one: cpmrt bench ended with 1"):
        compare_variants.main([*variants, "--rounds", "1", "--", *CASE])
    assert compare_variants.main([variants[0], f"again={ROOT}", "--rounds", "1", "--", *CASE]) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["8:2:1", "base"], ["8:2:1", "again"]]


def test_a_constant_that_is_not_there() -> None:
    with pytest.raises(SystemExit, match="has no attribute '_C'"):
        compare_variants.main([f"a={ROOT},cpmrt.bench.measure:_C=1", "--", *CASE])
