"""Forks of an answer's matcher share one matcher of llguidance; copies of it, one for each fork, are the oracle."""

import random

import pytest
from form_cases import LARK_GRAMMARS, REGEXES, schemas

from cpmrt import SamplingParams
from cpmrt.errors import FormError
from cpmrt.grammar import Thought
from cpmrt.grammar.compiled_form import Origin
from cpmrt.grammar.cursor import Place
from cpmrt.grammar.grammars import Grammars
from cpmrt.text.tokenizer import Tokenizer
from cpmrt.weights.model_folder import ModelFolder

pytest.importorskip("llguidance")
FORMS = [
    *[SamplingParams(json_schema=schema).form for schema in schemas(12, seed=9)],
    *[SamplingParams(regex=regex).form for regex in REGEXES[::20]],
    *[SamplingParams(grammar=grammar).form for grammar in LARK_GRAMMARS[::8]],
]


@pytest.fixture(scope="module")
def grammars():
    tokenizer = Tokenizer.open(ModelFolder.open(None).path)
    return Grammars(tokenizer, tokenizer.eos_token_ids, num_threads=1)


def tokens_in(bits):
    return [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]


def seen_by(matcher):
    """Return everything that a matcher of llguidance tells about its state."""
    state = matcher.is_stopped(), matcher.is_accepting(), matcher.is_error()
    return (*state, [] if matcher.is_stopped() else matcher.compute_ff_tokens(), matcher.compute_bitmask())


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_each_place_of_a_tree_is_that_of_a_copy(grammars, number):
    """A cursor that goes to any place of a tree, in any order and past an answer's end too, is in a copy's state
    there."""
    rng = random.Random(number)
    cursors = grammars.matcher(FORMS[number], Thought())()._cursors
    cursor = cursors.first
    known = [(cursors.beginning, cursor.origin.copy_for(cursor))]
    for _ in range(60):
        place, copied = rng.choice(known[-8:] if rng.random() < 0.8 else known)
        assert seen_by(cursor.go_to(place)) == seen_by(copied)
        choice = tokens_in(copied.compute_bitmask())
        if not copied.is_stopped() and choice:
            behind, tokens = copied.deep_copy(), [rng.choice(choice)]
            assert behind.consume_tokens(tokens)
            if not behind.is_stopped() and (forced := behind.compute_ff_tokens()):
                assert behind.consume_tokens(forced)
                tokens += forced
            known.append((cursor.consume(place, tokens), behind))
    for place, copied in rng.sample(known, len(known)):
        assert seen_by(cursor.go_to(place)) == seen_by(copied)


def test_a_fork_that_fails_harms_no_other(grammars):
    answer = grammars.matcher(SamplingParams(regex="(ab|cd){4}x").form, Thought())()
    answer.accept(tokens_of(grammars, "ab"))
    before, one, other = answer.allowed(), answer.fork(), answer.fork()
    with pytest.raises(FormError, match="cannot be followed"):
        one.accept(tokens_of(grammars, "x"))
    other.accept(tokens_of(grammars, "cd"))
    assert answer.allowed() == before
    with pytest.raises(FormError, match="cannot be followed"):
        one.allowed()
    other.accept(tokens_of(grammars, "ab"))
    other.accept(tokens_of(grammars, "abx"))
    assert other.is_complete and not answer.is_complete
    assert answer.allowed() == before


def test_forks_copy_nothing(grammars, monkeypatch):
    answer = grammars.matcher(SamplingParams(regex="[a-z]{1,400}").form, Thought())()
    tokens = tokens_in(answer.allowed())
    copies = []
    monkeypatch.setattr(Origin, "copy_for", lambda self, user: copies.append(user))
    for number in range(60):
        forks = [answer.fork() for _ in range(12)]
        for at, fork in enumerate(forks):
            fork.accept([tokens[(number + at) % 20]])
            fork.allowed()
        answer = forks[number % 12]
    assert not copies


def test_a_fork_of_an_answer_that_waits_shares_what_follows(grammars):
    answer = grammars.matcher(SamplingParams(regex="xy|yx").form, Thought())()
    fork = answer.fork()
    fork.accept(tokens_of(grammars, "x"))
    assert tokens_of(grammars, "y")[0] in tokens_in(fork.allowed())
    assert tokens_of(grammars, "x")[0] in tokens_in(answer.allowed())


def test_a_long_answer_is_freed():
    """Places chained over a whole answer are freed without a recursion as deep as the answer is long."""
    place = Place(None, ())
    for _ in range(200_000):
        place = Place(place, (1,))
    assert place.depth == 200_000
    del place


def tokens_of(grammars, text):
    return grammars._library.tokenize_str(text)
