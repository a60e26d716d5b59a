"""Chains of rules and schemas: up to the limit they are compiled, beyond it they are refused, and nothing crashes."""

import json
import subprocess
import sys
from time import perf_counter

import pytest

from cpmrt.grammar.depth import MAX_LEVELS, Part, deepest
from cpmrt.grammar.rule_depth import rule_levels
from cpmrt.grammar.schema_depth import schema_levels

pytest.importorskip("llguidance")


def ref(name):
    return {"$ref": f"#/$defs/{name}"}


def schemas(count, link, last=None):
    names = [f"d{number}" for number in range(count)]
    definitions = {name: link(ref(after)) for name, after in zip(names, names[1:], strict=False)}
    return {**ref("d0"), "$defs": {**definitions, names[-1]: last or {"type": "null"}}}


def rules(count, link, last, head):
    lines = [head] + [link.format(number, number + 1) for number in range(count)] + [last.format(count)]
    return "\n".join(lines)


CHAINS = {
    "GBNF": lambda n: {"grammar": rules(n, "r{} ::= r{}", 'r{} ::= "a"', "root ::= r0")},
    "rules": lambda n: {"grammar": rules(n, 'r{}: "b" r{} | "c"', 'r{}: "a"', "start: r0")},
    "groups": lambda n: {"grammar": rules(n // 16, f'r{{}}: {"(" * 15}"b" r{{}}{")*" * 15}', 'r{}: "a"', "start: r0")},
    "terminals": lambda n: {"grammar": rules(n, "R{}: R{}", 'R{}: "a"', "start: R0")},
    "complements": lambda n: {"grammar": rules(n, "R{}: ~R{}", 'R{}: "a"', "start: R0")},
    "schema in Lark": lambda n: {"grammar": "start: %json " + json.dumps(schemas(n, lambda each: each))},
    "$ref": lambda n: {"json_schema": schemas(n, lambda each: each)},
    "items": lambda n: {"json_schema": schemas(n, lambda each: {"type": "array", "items": each})},
    "properties": lambda n: {"json_schema": schemas(n // 2, lambda each: {"properties": {"a": {"anyOf": [each]}}})},
    "anyOf": lambda n: {"json_schema": schemas(n // 2, lambda each: {"anyOf": [each, {"type": "null"}]})},
    "allOf": lambda n: {"json_schema": schemas(n // 2, lambda each: {"allOf": [each, {"type": "null"}]})},
    "nested": lambda n: {"json_schema": schemas(n // 41, nested_40)},
}  # fmt: skip


def nested_40(each):
    for _ in range(40):
        each = {"type": "array", "items": each}
    return each


def compiled(form):
    """Return what another process says about a form: "compiled", or its refusal."""
    program = (
        "import json, sys\n"
        "from cpmrt import LLM, RequestError, SamplingParams\n"
        "with LLM(executor='reference', max_context=64) as llm:\n"
        "    try:\n"
        "        llm.generate('x', SamplingParams(**json.load(sys.stdin), max_new_tokens=2))\n"
        "        print('compiled')\n"
        "    except RequestError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(form), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    return done.stdout


@pytest.mark.parametrize("kind", CHAINS)
def test_a_form_at_the_limit_is_compiled(kind):
    assert compiled(CHAINS[kind](MAX_LEVELS - 4)) == "compiled\n"


@pytest.mark.parametrize("kind", CHAINS)
def test_a_form_that_would_overflow_the_stack_is_refused(kind):
    """The refusal says what is wrong, how many levels there may be and are, and what to change."""
    form = CHAINS[kind](4000)
    said = compiled(form)
    assert f"SamplingParams.{next(iter(form))}: expected at most {MAX_LEVELS} levels of" in said
    assert "got 4" in said or "got 3" in said
    assert "; write " in said


def test_other_ways_to_name_a_schema_count_too():
    """Anchors, ids, pointers with escapes and whole addresses lead to schemas as well."""

    def chain(name, key, others):
        defs = {f"d{n}": {key: name(n), "items": {"$ref": others(n + 1)}} for n in range(900)}
        return {"$ref": others(0), "$defs": {**defs, "d900": {key: name(900)}}}

    assert schema_levels(chain("a{}".format, "$anchor", "#a{}".format)) > MAX_LEVELS
    assert schema_levels(chain("http://e/{}".format, "$id", "http://e/{}".format)) > MAX_LEVELS
    assert schema_levels(chain(str, "title", "#/%24defs/d{}".format)) > MAX_LEVELS
    assert schema_levels(chain(str, "title", "http://e/x#/$defs/d{}".format)) > MAX_LEVELS


def test_circles_are_allowed_and_count_once():
    tree = {"$defs": {"node": {"properties": {"left": ref("node"), "right": ref("node")}}}, **ref("node")}
    assert schema_levels(tree) < 5 and schema_levels({"$ref": "#"}) < 5 and schema_levels(True) <= 1
    assert rule_levels('start: a\na: "(" a ")" | b\nb: a "x" | "y"') < 6
    assert deepest({number: Part(1, [(number + 1) % 50]) for number in range(50)}) == 50


@pytest.mark.parametrize("grammar", [
    'start: "r1 (" r0 // r1\nr0: /"r1: (/ # r1', 'start[max_tokens=1]: r0\n!r0[stop=":"]: <r1> /a/i',
    'start: %json {"const": "r1: r0 ("} r0\nr0: "x"',
])  # fmt: skip
def test_names_in_texts_are_no_rules(grammar):
    assert rule_levels(grammar) <= 4, "two rules, with attributes or a schema"


def test_the_levels_of_a_large_form_are_soon_found():
    begun = perf_counter()
    assert rule_levels(CHAINS["rules"](12_000)["grammar"]) > 12_000
    assert schema_levels(CHAINS["items"](5_000)["json_schema"]) > 5_000
    assert perf_counter() - begun < 2
