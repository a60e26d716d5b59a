"""Long JSON, which is read and written while other threads can run, is the same as that of the json module."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt import yielding_json
from cpmrt.yielding_json import MANY, Decoders, encoded

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
OPTIONS = ({}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}, {"sort_keys": True})


@pytest.fixture
def all_is_long(monkeypatch):
    monkeypatch.setattr(yielding_json, "LONG", 0)
    monkeypatch.setattr(yielding_json, "MANY", 0)


@pytest.mark.usefixtures("all_is_long")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@given(value=VALUES)
def test_a_long_value_is_written_as_json_dumps_writes_it(value, options):
    assert encoded(value, **options) == json.dumps(value, **options)


@pytest.mark.usefixtures("all_is_long")
@given(value=VALUES)
def test_a_long_text_is_read_as_json_loads_reads_it(value):
    text = json.dumps(value)
    assert Decoders().decode(text) == json.loads(text)


@pytest.mark.parametrize(
    "value", [[[]] * MANY, {"a": {str(i): i for i in range(MANY)}}, [[(1, 2)] * 64] * 64], ids=["wide", "dict", "tree"]
)
def test_a_value_with_many_within_is_written_in_parts(value, monkeypatch):
    written = json.dumps(value)
    monkeypatch.setattr(json, "dumps", None)
    assert encoded(value) == written


@pytest.mark.parametrize(
    "value", [[], {}, 7, "x" * 10 * MANY, [0] * (MANY - 1)], ids=lambda value: type(value).__name__
)
def test_a_value_with_few_within_is_written_in_one_go(value, monkeypatch):
    monkeypatch.setattr(json, "JSONEncoder", None)
    monkeypatch.setattr(json, "dumps", repr)
    assert encoded(value) == repr(value)


def test_a_value_that_contains_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(ValueError, match="Circular"):
        encoded(value)
