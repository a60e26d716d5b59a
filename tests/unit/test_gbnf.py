"""Grammars in llama.cpp's syntax, converted to Lark's."""

import re
from time import perf_counter

import pytest

pytest.importorskip("llguidance")
from cpmrt.grammar.gbnf import in_lark


@pytest.mark.parametrize("ending", ['"a"', "root"])
def test_a_chain_of_rules_is_converted_in_a_time_that_grows_with_its_length(ending):
    """Twelve thousand rules, each leading to the next, are converted soon, whether they are terminals or not."""
    chain = "\n".join(f"r{number} ::= r{number + 1}" for number in range(12_000))
    begun = perf_counter()
    text = in_lark(f"root ::= r0\n{chain}\nr12000 ::= {ending}\n")
    assert perf_counter() - begun < 2
    assert ("\nR7: R8\n" if ending == '"a"' else "\nr7: r8\n") in text


def test_rules_of_terminals_become_terminals():
    """A rule that leads to itself, or to the first rule, is none; all others are, wherever they are defined."""
    rules = ["root ::= a | b | d | e", 'a ::= c "x"', 'b ::= root? | "y"', "c ::= [0-9]+", 'd ::= d "x"', "e ::= a | b"]
    text = in_lark("\n".join(rules))
    assert re.findall(r"^\w+(?=:)", text, re.MULTILINE) == ["start", "A", "b", "C", "d", "e"]
    assert 'A: C "x"' in text and "b: start? | " in " ".join(text.split())
