"""Log-probabilities as JSON: their values, and the time that writing them takes."""

from __future__ import annotations

import codecs
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import least_cpu_seconds, slowness
from tiny_checkpoint import write_checkpoint

from cpmrt.executor import TokenLogprobs
from cpmrt.server.token_logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from cpmrt.text import Tokenizer

END = 2
TOKENS = st.integers(0, 255)
NUMBERS = st.floats(-1e4, 0) | st.just(-float("inf"))
ENTRIES = st.lists(
    st.builds(TokenLogprobs, TOKENS, NUMBERS, st.lists(st.tuples(TOKENS, NUMBERS), max_size=5).map(tuple)), max_size=12
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_checkpoint(folder)
    return Tokenizer.open(folder)


def bytes_of(tokenizer, token):
    return tokenizer.token_bytes(token) or tokenizer.decode([token], skip_special_tokens=False).encode()


def text_of(tokenizer, token):
    return bytes_of(tokenizer, token).decode("utf-8", "replace")


def parsed(written):
    return json.loads("".join(written))


@given(ENTRIES, st.integers(0, 5), st.integers(0, 12))
def test_of_a_chat(tokenizer, entries, count, cut):
    def shown(token, logprob):
        return {
            "token": text_of(tokenizer, token), "logprob": max(logprob, -9999.0), "bytes": [*bytes_of(tokenizer, token)]
        }  # fmt: skip

    logprobs = ChatLogprobs(TokenTexts(tokenizer), frozenset({END}), count)
    for part in (entries[:cut], entries[cut:]):
        logprobs.add(part[:1])
        logprobs.add(part[1:])
        expected = [
            {**shown(entry.token_id, entry.logprob), "top_logprobs": [shown(*pair) for pair in entry.top[:count]]}
            for entry in part if entry.token_id != END
        ]  # fmt: skip
        assert parsed(logprobs.take()) == {"content": expected, "refusal": None}


@given(ENTRIES, st.integers(0, 5))
def test_of_a_completion(tokenizer, entries, count):
    logprobs = CompletionLogprobs(TokenTexts(tokenizer), frozenset({END}), count)
    logprobs.add(entries)
    kept = [entry for entry in entries if entry.token_id != END]
    texts = [text_of(tokenizer, entry.token_id) for entry in kept]
    tops = []
    for entry in kept:
        likely = sorted(entry.top[:count], key=lambda pair: -entry.top.index(pair))
        tops.append({
            text_of(tokenizer, token): max(lp, -9999.0) for token, lp in [(entry.token_id, entry.logprob), *likely]
        })  # fmt: skip
    raw = [tokenizer.token_bytes(entry.token_id) for entry in kept]
    complete = [codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(raw[:at])) for at in range(len(raw))]
    assert parsed(logprobs.take()) == {
        "tokens": texts,
        "token_logprobs": [max(entry.logprob, -9999.0) for entry in kept],
        "top_logprobs": tops if count else None,
        "text_offset": [len(text) for text in complete],
    }


def test_the_token_that_was_taken_is_always_among_the_top(tokenizer):
    logprobs = CompletionLogprobs(TokenTexts(tokenizer), frozenset(), 2)
    logprobs.add([TokenLogprobs(70, -5.0, ((71, -0.5), (72, -1.5), (73, -2.5)))])
    expected = {text_of(tokenizer, token): logprob for token, logprob in ((71, -0.5), (72, -1.5), (70, -5.0))}
    assert parsed(logprobs.take())["top_logprobs"] == [expected]


def test_without_a_tokenizer_tokens_are_numbers():
    logprobs = ChatLogprobs(TokenTexts(None), frozenset(), 0)
    logprobs.add([TokenLogprobs(7, -1.0)])
    (entry,) = parsed(logprobs.take())["content"]
    assert entry == {"token": "token_id:7", "bytes": [], "logprob": -1.0, "top_logprobs": []}


@pytest.mark.parametrize("kind", [ChatLogprobs, CompletionLogprobs])
def test_16k_tokens_take_less_than_a_second_and_come_in_pieces(tokenizer, kind):
    top = tuple((token, -float(token)) for token in range(10, 30))
    entries = [TokenLogprobs(10 + index % 200, -0.5, top) for index in range(16_000)]
    written = []

    def work():
        logprobs = kind(TokenTexts(tokenizer), frozenset(), 20)
        for entry in entries:
            logprobs.add((entry,))
        written[:] = logprobs.take()

    limit = 1.0 * slowness(time.process_time)
    assert least_cpu_seconds(work, limit) < limit
    assert max(map(len, written)) < 2**19 and len(json.dumps(parsed(written))) > 2**20
