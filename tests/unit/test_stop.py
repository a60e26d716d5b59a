"""Stop strings: the text that is shown, when it is shown, and where it is cut."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_cpu_seconds, slowness

from cpmrt.errors import RequestError
from cpmrt.text import StopStrings
from cpmrt.text.streaming import StopAutomaton, stop_automaton


def run(stop, pieces):
    """Return all text shown, and whether a stop string was hit."""
    strings, shown = StopStrings(stop), ""
    for piece in pieces:
        text, hit = strings.push(piece)
        shown += text
        if hit:
            return shown, True
    return shown + strings.flush(), False


def cut(stop, text):
    """Return the same by definition: cut at the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [len(s) for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end - max(hits)], True
    return text, False


words = st.text("abc", min_size=1, max_size=5)


@given(st.lists(words, max_size=4).map(tuple), st.lists(st.text("abc", max_size=4), max_size=12))
def test_equals_cutting_the_joined_text(stop, pieces):
    assert run(stop, pieces) == cut(stop, "".join(pieces))


@given(st.lists(words, min_size=1, max_size=3).map(tuple), st.text("abc", max_size=20))
def test_holds_back_only_what_may_become_a_stop_string(stop, text):
    strings, shown, seen = StopStrings(stop), "", ""
    for char in text:
        piece, hit = strings.push(char)
        shown, seen = shown + piece, seen + char
        if hit:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert not held or any(s.startswith(held) for s in stop)


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (("\n\n",), ["a\n", "\nb"], ("a", True)),
        (("</s>",), ["x</", "p></", "s>y"], ("x</p>", True)),
        (("ab", "b"), ["a", "b"], ("", True)),
        (("abcd", "bc"), ["abcd"], ("a", True)),
        (("aab",), ["aa", "ab"], ("a", True)),
        (("你好",), ["我说你", "好吗"], ("我说", True)),
        (("stop",), ["sto"], ("sto", False)),
        ((), ["any", "thing"], ("anything", False)),
    ],
)
def test_examples(stop, pieces, expected):
    assert run(stop, pieces) == expected


def test_nothing_is_shown_after_a_hit():
    strings = StopStrings(("x",))
    assert strings.push("ax") == ("a", True)
    assert strings.push("more") == ("", True)
    assert strings.flush() == ""


def test_what_was_held_back_for_a_stop_string_that_came_is_no_rest():
    strings = StopStrings(("abc",))
    assert [strings.push("xab"), strings.push("c")] == [("x", False), ("", True)]
    assert strings.flush() == ""


def test_long_stop_string_that_almost_matches_is_linear():
    strings = StopStrings(("a" * 20_000 + "b",))
    shown = sum(len(strings.push("a" * 100)[0]) for _ in range(600))
    assert shown == 60_000 - 20_000
    assert len(strings.flush()) == 20_000


@pytest.mark.parametrize("stop", [
    ("a" * 16_000 + "b",),
    tuple(f"{number:04}" * 4 for number in range(1000)),
    tuple("a" * length for length in range(1, 178)),
], ids=["one long", "many", "each begins the next"])  # fmt: skip
def test_building_and_following_16_kb_takes_time_in_proportion(stop):
    def work():
        StopAutomaton(stop)
        stop_automaton(stop)
        strings = StopStrings(stop)
        for _ in range(1000):
            strings.push("000100020" * 10)

    limit = 0.5 * slowness(time.process_time)
    assert least_cpu_seconds(work, limit) < limit


def test_sequences_with_the_same_stop_strings_share_their_tables():
    stop = ("one", "two")
    assert stop_automaton(stop) is stop_automaton(tuple(["one", "two"]))
    assert run(stop, ["a one"]) == ("a ", True) and run(stop, ["a tw", "o"]) == ("a ", True)


@pytest.mark.parametrize("stop", [("",), ("a", ""), (1,)])
def test_malformed(stop):
    with pytest.raises(RequestError, match="non-empty strings"):
        StopStrings(stop)
