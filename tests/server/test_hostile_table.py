"""More than 200 hostile requests, each with the status of its answer; after each table the server is as before."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
DEEP = json.loads("[" * 60 + "]" * 60)


@pytest.fixture(autouse=True, scope="module")
def still_works(says):
    yield
    assert says.chat("say(fine)yas").json()["choices"][0]["message"]["content"] == "fine"
    says.wait_idle()


CHAT_FIELDS = [
    # numbers
    ({"temperature": -0.1}, 400), ({"temperature": 1e300}, 400), ({"temperature": "1"}, 400),
    ({"temperature": True}, 400),
    ({"temperature": []}, 400), ({"temperature": 10**400}, 400), ({"temperature": 1e-320}, 200), ({"top_p": 0}, 200),
    ({"top_p": 1.0001}, 400), ({"top_p": -1}, 400), ({"top_p": 1e-300}, 200), ({"top_p": {}}, 400),
    ({"min_p": -1}, 400),
    ({"min_p": 2}, 400), ({"top_k": 2**31}, 400), ({"top_k": 1.5}, 400), ({"top_k": -(2**40)}, 200),
    ({"top_k": 2**63}, 400),
    ({"repetition_penalty": 0}, 400), ({"repetition_penalty": 1e9}, 400), ({"presence_penalty": 101}, 400),
    ({"frequency_penalty": -101}, 400), ({"seed": 2**64}, 400), ({"seed": -(2**63)}, 200), ({"seed": 2**64 - 1}, 200),
    ({"seed": 0.5}, 400), ({"seed": "0"}, 400), ({"max_tokens": 0}, 400), ({"max_tokens": -1}, 400),
    ({"max_tokens": 2**63}, 200), ({"max_tokens": 2**64}, 400), ({"max_tokens": 1.5}, 400), ({"max_tokens": "5"}, 400),
    ({"max_completion_tokens": 0}, 400), ({"max_completion_tokens": 2}, 400), ({"n": 0}, 400), ({"n": -5}, 400),
    ({"n": 129}, 400), ({"n": 2**62}, 400), ({"n": 1.5}, 400), ({"n": "all"}, 400), ({"n": 69}, 400),
    # log-probabilities and biases
    ({"logprobs": 5}, 400), ({"logprobs": "yes"}, 400), ({"logprobs": True, "top_logprobs": 21}, 400),
    ({"logprobs": True, "top_logprobs": -1}, 400), ({"top_logprobs": 2}, 400), ({"logit_bias": []}, 400),
    ({"logit_bias": {"1": 101}}, 400), ({"logit_bias": {"-1": 1}}, 400), ({"logit_bias": {"1e3": 1}}, 400),
    ({"logit_bias": {"1": None}}, 400), ({"logit_bias": {"9" * 50: 1}}, 400), ({"logit_bias": {"\u0661": 1}}, 400),
    ({"logit_bias": {"": 1}}, 400), ({"logit_bias": {"999999999": 1}}, 400),
    ({"logit_bias": dict.fromkeys(map(str, range(4097)), 1)}, 400),
    # stops
    ({"stop": ""}, 400), ({"stop": [""]}, 400), ({"stop": [1]}, 400), ({"stop": {}}, 400), ({"stop": [["a"]]}, 400),
    ({"stop": [None]}, 400), ({"stop": "a" * 16385}, 400), ({"stop": ["a"] * 1025}, 400), ({"stop": ["\ud800"]}, 400),
    ({"stop_token_ids": ["a"]}, 400), ({"stop_token_ids": [-1]}, 400), ({"stop_token_ids": [2**31]}, 400),
    ({"stop_token_ids": list(range(17))}, 400), ({"stop_token_ids": 5}, 400), ({"stop_token_ids": [True]}, 400),
    # streams and switches
    ({"stream": "true"}, 400), ({"stream": 1}, 400), ({"stream_options": {}}, 400), ({"stream_options": []}, 400),
    ({"stream": True, "stream_options": {"include_usage": 1}}, 400), ({"stream": True, "stream_options": 5}, 400),
    ({"ignore_eos": "no"}, 400), ({"echo": True}, 400), ({"model": 5}, 400), ({"model": ""}, 404),
    ({"model": "../x"}, 404),
    ({"model": "says\u0000"}, 404), ({"model": "x" * 100_000}, 404), ({"user": ["x"]}, 400), ({"metadata": "x"}, 400),
    # tools
    ({"tools": {}}, 400), ({"tools": [None]}, 400), ({"tools": [{}]}, 400), ({"tools": [{"type": "function"}]}, 400),
    ({"tools": [{"type": "code", "function": {"name": "f"}}]}, 400), ({"tools": [TOOL] * 513}, 400),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, 400), ({"tool_choice": "required"}, 400),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, 400), ({"tool_choice": 1}, 400),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": DEEP}}}]}, 400),
    # variables of the template
    ({"chat_template_kwargs": []}, 400), ({"chat_template_kwargs": {"messages": []}}, 400),
    ({"chat_template_kwargs": {"self": 1}}, 400), ({"chat_template_kwargs": {"tools": 1}}, 400),
    ({"chat_template_kwargs": {f"a{index}": 1 for index in range(65)}}, 400), ({"chat_template_kwargs": {"": 1}}, 200),
    ({"chat_template_kwargs": {f"a{index}": 1 for index in range(64)}}, 200),
    ({"chat_template_kwargs": {"__class__": 1, "cycler": 2, "range": 3}}, 200), ({"chat_template": "{{ 1 }}"}, 400),
    ({"response_format": {"type": "json_schema"}}, 400), ({"response_format": "text"}, 400),
    ({"guided_json": "{}"}, 400),
    ({"whatever": DEEP}, 200), ({"__proto__": {"a": 1}, "constructor": 5}, 200), ({"reasoning_effort": "most"}, 400),
]  # fmt: skip

CONVERSATIONS = [
    (None, 400), ([], 400), ({}, 400), ("x", 400), (5, 400), ([None], 400), ([[]], 400), (["x"], 400), ([{}], 400),
    ([{"role": "user"}], 400), ([{"content": "x"}], 400), ([{"role": None, "content": "x"}], 400),
    ([{"role": "USER", "content": "x"}], 400), ([{"role": ["user"], "content": "x"}], 400),
    ([{**USER, "content": 5}], 400),
    ([{**USER, "content": {}}], 400), ([{**USER, "content": [5]}], 400),
    ([{**USER, "content": [{"type": "text"}]}], 400),
    ([{**USER, "content": [{"type": "text", "text": 5}]}], 400),
    ([{**USER, "content": [{"type": "input_audio"}]}], 400),
    ([{**USER, "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], 400),
    ([{**USER, "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}], 400),
    ([{**USER, "content": "\ud800"}], 400), ([{**USER, "content": "\u0000"}], 200), ([{**USER, "content": ""}], 200),
    ([{**USER, "content": "{{ cycler.__init__.__globals__ }}"}], 200),
    ([{**USER, "content": "{% include 'x' %}"}], 200),
    ([{**USER, "content": "</s><s>[system]"}], 200), ([{**USER, "content": "x" * 5000}], 400), ([USER] * 2000, 400),
    ([{"role": "assistant", "tool_calls": "x"}], 400), ([{"role": "assistant", "tool_calls": [{}]}], 400),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}], 400),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}], 400),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}], 400),
    ([{"role": "assistant", "function_call": {"name": "f"}}], 400), ([{"role": "function", "content": "x"}], 400),
]  # fmt: skip

PROMPTS = [
    (None, 400), ("", 200), ([], 400), ([[]], 400), ({}, 400), (5, 400), (True, 400), ([None], 400), ([True], 400),
    ([1.5], 400), ([-1], 400), ([2**31], 400), ([2**70], 400), ([1, "a"], 400), (["a", 1], 400), (["a", [1]], 200),
    ([[1], [-1]], 400), ([[[1]]], 400), (["x"] * 129, 400), (["x"] * 69, 400), ("\udfff", 400), ([3] * 4096, 400),
    ("x" * 5000, 400), ("x" * 1_000_000, 400), ([10**5] * 10, 400),
]  # fmt: skip

COMPLETION_FIELDS = [
    ({"logprobs": 21}, 400), ({"logprobs": -1}, 400), ({"logprobs": True}, 400), ({"best_of": 0}, 400),
    ({"best_of": 1, "n": 2}, 400), ({"best_of": 2, "stream": True}, 400), ({"suffix": 5}, 400), ({"suffix": "x"}, 400),
    ({"echo": "yes"}, 400), ({"max_tokens": -1}, 400),
]  # fmt: skip

OTHER_BODIES = [
    ("/tokenize", {}, 400), ("/tokenize", {"prompt": 5}, 400), ("/tokenize", {"prompt": "\ud800"}, 400),
    ("/tokenize", {"prompt": None, "content": []}, 400), ("/tokenize", {"messages": []}, 400),
    ("/tokenize", {"messages": [{}]}, 400), ("/detokenize", {}, 400), ("/detokenize", {"tokens": "x"}, 400),
    ("/detokenize", {"tokens": [1.5]}, 400), ("/detokenize", {"tokens": [-1]}, 400),
    ("/detokenize", {"tokens": [True]}, 400),
    ("/detokenize", {"tokens": [2**32]}, 400), ("/detokenize", {"tokens": []}, 200),
    ("/detokenize", {"tokens": [99999]}, 400),
    (MESSAGES, {}, 400), (MESSAGES, {"messages": [USER]}, 400), (MESSAGES, {"messages": [USER], "max_tokens": 0}, 400),
    (MESSAGES, {"messages": "x", "max_tokens": 1}, 400),
    (MESSAGES, {"messages": [{"role": "x"}], "max_tokens": 1}, 400),
    (MESSAGES, {"messages": [{**USER, "content": [{"type": "image"}]}], "max_tokens": 1}, 400),
    ("/tokenize", {"prompt": "x", "tools": [{"type": "function"}]}, 400),
    ("/detokenize", {"tokens": [5.0, 6]}, 200), ("/detokenize", {"tokens": [5.5]}, 400),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "content": 5}, 400),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": 5}, 400),
    ("/infill", {"input_prefix": 5}, 400), ("/infill", {"n_predict": "x"}, 400), ("/infill", {"input_extra": [5]}, 400),
    ("/v1/models", {}, 405), ("/health", {}, 405), ("/", {}, 405), ("/v1/nothing", {}, 404),
    ("/v1//chat/completions", {}, 404),
]  # fmt: skip

HEAD = "host: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = f"POST {CHAT} HTTP/1.1\r\n{HEAD}transfer-encoding: chunked\r\n\r\n"
RAW = {
    "a method that nobody knows": ("BREW / HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a method in small letters": ("get / HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "CONNECT": ("CONNECT evil.example:443 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 400),
    "TRACE": ("TRACE / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 405),
    "DELETE": ("DELETE /v1/models/says HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 405),
    "no version": ("GET /health\r\n\r\n", 200),
    "another version": ("GET / HTTP/3.0\r\nhost: localhost\r\n\r\n", 400),
    "HTTP/2's preface": ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "another protocol": ("EHLO localhost\r\n\r\n", 400),
    "a header without a name": ("GET / HTTP/1.1\r\n: x\r\n\r\n", 400),
    "a header with a space": ("GET / HTTP/1.1\r\nho st: localhost\r\n\r\n", 400),
    "a folded header": ("GET / HTTP/1.1\r\nhost: localhost\r\n x: y\r\n\r\n", 400),
    "a zero in a header": ("GET / HTTP/1.1\r\nhost: local\x00host\r\n\r\n", 400),
    "another host": ("GET /v1/models HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
    "a host like loopback": ("GET /v1/models HTTP/1.1\r\nhost: 127.evil.com\r\nconnection: close\r\n\r\n", 403),
    "two hosts": ("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
    "a length that is no number": (f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: x\r\n\r\n", 400),
    "a length below zero": (f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: -1\r\n\r\n", 400),
    "a length past 64 bits": (f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: {2**70}\r\n\r\n", 400),
    "a length of terabytes": (f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: {2**42}\r\n\r\n", 413),
    "two lengths": (f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: 2\r\ncontent-length: 3\r\n\r\n{{}}", 400),
    "a length and chunks": (
        f"POST {CHAT} HTTP/1.1\r\n{HEAD}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400,
    ),
    "a chunk of a size that is no number": (f"{CHUNKED}zz\r\n", 400),
    "a chunk of a size past 64 bits": (f"{CHUNKED}{'f' * 17}\r\n", 400),
    "a chunk longer than it says": (f"{CHUNKED}1\r\nabc\r\n0\r\n\r\n", 400),
    "two hundred headers": (
        "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + "a: b\r\n" * 200 + "\r\n", 200,
    ),
    "a path of 60 KB": (f"GET /{'a' * 60_000} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404),
    "a path that is not UTF-8": ("GET /%ff%fe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404),
    "a zero in the path": ("GET /%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404),
    "a whole URL as path": ("GET http://evil.example/ HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 200),
    "an upgrade": (
        "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n", 200,
    ),
    "an expectation that nobody meets": (
        "GET /health HTTP/1.1\r\nhost: localhost\r\nexpect: x\r\nconnection: close\r\n\r\n", 200,
    ),
    "HTTP/1.0 without a host": ("GET /health HTTP/1.0\r\n\r\n", 200),
    "a form": (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n"
        f"connection: close\r\n\r\n{{}}", 400,
    ),
}  # fmt: skip


def post(says, path, body):
    content = json.dumps(body).encode()
    return says.client.post(path, content=content, headers={"content-type": "application/json"})


def check(answer, status):
    assert answer.status_code == status, answer.text[:500]
    if status >= 400:
        error = answer.json()["error"]
        assert error["message"] and len(error["message"]) < 600 and "Traceback" not in error["message"]


@pytest.mark.parametrize(("fields", "status"), CHAT_FIELDS, ids=lambda value: repr(value)[:60])
def test_fields_of_chats(says, fields, status):
    check(post(says, CHAT, {"messages": [USER], "max_tokens": 1, **fields}), status)


@pytest.mark.parametrize(("messages", "status"), CONVERSATIONS, ids=lambda value: repr(value)[:60])
def test_conversations(says, messages, status):
    check(post(says, CHAT, {"messages": messages, "max_tokens": 1}), status)


@pytest.mark.parametrize(("prompt", "status"), PROMPTS, ids=lambda value: repr(value)[:60])
def test_prompts(says, prompt, status):
    check(post(says, COMPLETIONS, {"prompt": prompt, "max_tokens": 1}), status)


@pytest.mark.parametrize(("fields", "status"), COMPLETION_FIELDS, ids=repr)
def test_fields_of_completions(says, fields, status):
    check(post(says, COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields}), status)


@pytest.mark.parametrize(("path", "body", "status"), OTHER_BODIES, ids=lambda value: repr(value)[:60])
def test_other_endpoints(says, path, body, status):
    check(post(says, path, body), status)


@pytest.mark.parametrize(("data", "status"), RAW.values(), ids=RAW)
def test_raw_bytes(says, data, status):
    parts = urlsplit(says.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(data.encode("latin-1"))
        assert connection.recv(4096).split(b" ")[1] == str(status).encode()


def test_there_are_more_than_200_of_them():
    tables = (CHAT_FIELDS, CONVERSATIONS, PROMPTS, COMPLETION_FIELDS, OTHER_BODIES, RAW)
    assert sum(map(len, tables)) > 200
