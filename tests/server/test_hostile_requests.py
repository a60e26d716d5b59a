"""Hostile requests: each is answered with a 4xx or cut off, and the next request works."""

from __future__ import annotations

import gzip
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest
from serving import saying_llm, serving

from cpmrt.server import http_protocol, json_body

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def still_works(says):
    yield
    assert says.chat("say(fine)yas").json()["choices"][0]["message"]["content"] == "fine"
    says.wait_idle()


def connect(server):
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def raw(server, data: bytes) -> bytes:
    """Send these bytes and return everything that comes back until the server closes."""
    with connect(server) as connection:
        connection.sendall(data)
        return drained(connection)


def drained(connection) -> bytes:
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionError:
        pass
    return received


def post(says, content: bytes, path=CHAT, **headers):
    return says.client.post(path, content=content, headers={**JSON, **headers})


MALFORMED = {
    "empty": b"",
    "no json": b"{",
    "no object": b"[1, 2]",
    "a string": b'"messages"',
    "malformed utf-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "a utf-16 body": '{"messages": []}'.encode("utf-16"),
    "nan": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role": "user", "content": "x"}], "top_p": -Infinity}',
    "a float past the largest": b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    "a huge integer": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 4000 + b"}",
    "an integer too long to parse": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 9000 + b"}",
    "a huge max_tokens": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 99999999999999999999}',
    "nested arrays": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "nested just past the limit": b'{"whatever": ' + b"[" * 64 + b"]" * 64 + b"}",
    "a lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a lone surrogate as model": b'{"model": "\\udfff", "messages": [{"role": "user", "content": "x"}]}',
    "a null message": b'{"messages": [null]}',
    "numbers as content": b'{"messages": [{"role": "user", "content": 5}]}',
    "reserved template variables": b'{"messages": [{"role": "user", "content": "x"}], '
    b'"chat_template_kwargs": {"messages": 1}}',
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_body_is_a_400_or_404(says, content):
    answer = post(says, content)
    assert answer.status_code in (400, 404), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_half_of_a_surrogate_pair_is_found_in_its_message(says):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c\ud83d"}]
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": parts}]
    error = post(says, json.dumps({"messages": messages}).encode()).json()["error"]
    assert error["param"] == "messages[1].content"
    assert error["message"] == "messages[1].content: expected valid Unicode, got half of a surrogate pair (character 3)"


def test_a_number_too_long_to_parse_comes_with_no_advice_about_python(says):
    message = post(says, MALFORMED["an integer too long to parse"]).json()["error"]["message"]
    assert message.endswith("value has 9000 digits") and "sys." not in message


def test_json_that_is_deep_but_allowed(says):
    content = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "whatever": ' + b"[" * 63 + b"]" * 63
    assert post(says, content + b"}").status_code == 200


def test_a_form_of_another_origin_is_refused(says):
    answer = says.client.post(CHAT, content=b'{"messages": []}', headers={"content-type": "text/plain"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_content_type"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/tokenize"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, zstd"])
def test_a_compressed_body_is_refused_with_what_to_do(says, path, encoding):
    answer = post(says, gzip.compress(b'{"messages": []}'), path, **{"content-encoding": encoding})
    error = answer.json()["error"]
    assert answer.status_code == 415 and error["code"] == "unsupported_content_encoding"
    assert error["type"] == "invalid_request_error" and "send the body uncompressed" in error["message"]


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_a_body_that_says_it_is_not_compressed_is_read(says, encoding):
    content = b'{"messages": [{"role": "user", "content": "say(fine)yas"}]}'
    assert post(says, content, **{"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_a_413(says, is_chunked):
    size = 2**20 + 1
    content = (b"x" * 65536 for _ in range(17)) if is_chunked else b"x" * size
    answer = says.client.post(CHAT, content=content, headers=JSON)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert answer.headers["connection"] == "close"


def test_a_content_length_that_is_a_lie_is_not_waited_for(says, monkeypatch):
    monkeypatch.setattr(json_body, "BODY_TIMEOUT_S", 0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = raw(says, head + b"content-length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_slowloris_is_cut_off(says, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    with connect(says) as connection:
        begun = time.monotonic()
        connection.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(40):
            try:
                connection.sendall(b"x-a: 1\r\n")
            except ConnectionError:
                break
            time.sleep(0.02)
        assert drained(connection) == b"" and time.monotonic() - begun < 10


def test_a_silent_connection_is_closed(says, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    assert raw(says, b"") == b""


def test_an_endless_header_is_a_431(says):
    with connect(says) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
        try:
            for _ in range(20):
                connection.sendall(b"a" * 8192)
        except ConnectionError:
            pass
        assert drained(connection)[:12] in (b"HTTP/1.1 431", b"")


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00", b"X\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 100])
def test_what_is_no_http_is_a_400(says, data):
    assert raw(says, data).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("path", [
    "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page/index.html", "//etc/passwd", "/v1/models/../../x",
    "/v1/", "/static",
])  # fmt: skip
def test_no_path_reads_a_file(says, path):
    answer = raw(says, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404") and b"root:" not in answer


def test_a_wrong_method_is_a_405(says):
    answer = says.client.get(CHAT)
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.json()["error"]["message"].endswith("Method Not Allowed; use POST")


@pytest.mark.parametrize(("path", "hint"), [
    ("/chat/completions", "; did you mean /v1/chat/completions?"), ("/v1/v1/messages", "; did you mean /v1/messages?"),
    ("/v1/chat/completions/", "; did you mean /v1/chat/completions?"), ("/v1/model", "; did you mean /v1/models?"),
    ("/completion", "; did you mean /v1/completions?"), ("/api/generate", "; /openapi.json lists the endpoints"),
])  # fmt: skip
def test_a_path_that_is_not_here_names_the_one_that_is_meant(says, path, hint):
    answer = says.client.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == f"POST {path}: Not Found{hint}" and error["code"] == "not_found"


def test_a_name_that_another_site_gave_this_machine_is_refused(says):
    assert says.client.get("/v1/models", headers={"host": "evil.example:8000"}).status_code == 403
    assert says.client.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200


def logged(caplog, text):
    """Wait for log lines with `text` and return them; a request is logged only after its answer is sent."""
    until = time.monotonic() + 30
    while not (found := [line for line in caplog.messages if text in line]) and time.monotonic() < until:
        time.sleep(0.01)
    assert found, f"no line with {text!r}"
    return found


def test_a_path_cannot_forge_a_line_of_the_log(says, caplog):
    caplog.set_level("INFO", logger="cpmrt.server")
    says.client.get("/a%0Aforged 200")
    logged(caplog, "forged")
    assert not any("\n" in line for line in caplog.messages)


def test_the_log_has_no_prompt_text(says, caplog):
    caplog.set_level("INFO", logger="cpmrt.server")
    says.chat("say(secret)yas")
    says.client.get("/health")
    (line,) = logged(caplog, "new=7")
    client, request_id, status, method, path, *_ = line.split()
    assert client.startswith("127.0.0.1:") and request_id.startswith("chatcmpl-") and "secret" not in line
    assert (status, method, path) == ("200", "POST", CHAT)


def test_a_template_of_the_model_gets_at_nothing(tmp_path):
    template = "{{ messages.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}"
    with serving(lambda: saying_llm(tmp_path, str, template=template), model_name="evil") as server:
        answer = server.chat("x")
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "template_refused"
        assert str(tmp_path) not in answer.text
        assert server.client.get("/health").status_code == 200


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    with serving(lambda: saying_llm(folder, lambda prompt: "ok"), api_keys=("sésame",), log_prompts=True) as server:
        server.client.headers["authorization"] = "Bearer sésame"
        yield server


@pytest.fixture(scope="module")
def anonymous(locked):
    with httpx.Client(base_url=locked.url) as client:
        yield client


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer sesame", "Basic sésame", "sésame", "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/tokenize", CHAT, "/nothing"])
def test_without_the_key_everything_but_the_page_and_health_is_a_401(locked, anonymous, header, path):
    headers = {} if header is None else {"authorization": header.encode("utf-8" if "é" in header else "latin-1")}
    answer = anonymous.get(path, headers=headers)
    assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key(locked, anonymous, caplog):
    caplog.set_level("INFO", logger="cpmrt.server")
    assert locked.chat("the prompt").json()["choices"][0]["message"]["content"] == "ok"
    for path in ("/", "/health", "/health/live", "/openapi.json"):
        assert anonymous.get(path).status_code == 200
    logged(caplog, "the prompt")  # --log-prompts was asked for


def test_the_key_is_compared_in_constant_time(monkeypatch, locked):
    from cpmrt.server import access

    compared = []
    monkeypatch.setattr(access, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    assert locked.client.get("/v1/models").status_code == 401
    assert [len(key) for key in compared[0]] == [32, 32], "digests of one length"


def test_tokenize_and_detokenize_are_inverse(says):
    text = "ü <b> \n"
    tokens = says.client.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["tokens"][0] == 1
    back = says.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["prompt"] == f"<s>{text}"
    bare = says.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare["tokens"] == tokens["tokens"][1:]
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": ["a"]}), ("/detokenize", {"tokens": [-1]})):
        assert says.client.post(path, content=json.dumps(body), headers=JSON).status_code == 400
