"""Access to a server: several keys, names of the model, origins of pages, HTTPS."""

from __future__ import annotations

import ssl
from inspect import signature
from pathlib import Path

import httpx
import pytest
from serving import saying_llm, serving
from starlette.middleware.cors import CORSMiddleware

from cpmrt.cli.main import main
from cpmrt.cli.parser import Parser
from cpmrt.cli.serve import configure
from cpmrt.errors import ConfigError
from cpmrt.server.access import ApiKeys, read_keys, tls_context

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with two keys, two more names of its model, and one origin."""
    folder = tmp_path_factory.mktemp("guarded")
    settings = {"api_keys": ("first", "zweiter"), "aliases": ("gpt-4o", "any"), "cors_origins": (ORIGIN,)}
    with serving(lambda: saying_llm(folder, lambda prompt: "ok"), **settings) as server:
        server.client.headers["x-api-key"] = "first"
        yield server


@pytest.mark.parametrize(("headers", "status"), [
    ({"Authorization": "Bearer first"}, 200),
    ({"Authorization": "bearer zweiter"}, 200),
    ({"x-api-key": "zweiter"}, 200),
    ({"Authorization": "Bearer wrong", "x-api-key": "first"}, 200),
    ({"Authorization": "Bearer third"}, 401),
    ({"Authorization": "Basic first"}, 401),
    ({"x-api-key": "first,zweiter"}, 401),
    ({"x-api-key": ""}, 401),
    ({}, 401),
])  # fmt: skip
def test_any_of_the_keys_opens(guarded, headers, status):
    assert httpx.get(guarded.url + "/v1/models", headers=headers).status_code == status


def test_no_key_admits_nobody_where_there_are_keys():
    assert not ApiKeys(["k"]).admit([]) and not ApiKeys(["k"]).admit([(b"authorization", b"Bearer")])
    assert not ApiKeys([])


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# of the office\nabc\n\n  def  \n")
    assert read_keys(path) == ("abc", "def")
    for text in (None, "# nothing\n"):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ConfigError, match="--api-key-file"):
            read_keys(path)


def test_a_file_without_end_is_no_file_of_keys():
    with pytest.raises(ConfigError, match="--api-key-file /dev/zero is too large: expected at most 1048576 bytes"):
        read_keys(Path("/dev/zero"))


def test_a_file_that_is_too_large_is_not_called_undecodable_where_its_beginning_ends_within_a_character(tmp_path):
    (tmp_path / "keys").write_bytes(b"x" * 2**20 + "é".encode())
    with pytest.raises(ConfigError, match="is too large"):
        read_keys(tmp_path / "keys")


def test_an_error_of_the_file_names_it_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "absent")
    assert str(caught.value) == f"--api-key-file {tmp_path}/absent cannot be read: No such file or directory"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfabc\r\ndef\r\n")
    assert read_keys(path) == ("abc", "def")


@pytest.mark.parametrize("key", ["ö", "é€", "a\tb", "a\x7f", " key", "key ", "k\udcff"])
def test_a_key_that_no_header_can_carry_is_refused(key, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CPMRT_API_KEY", raising=False)
    serve = ["serve", "/no/model", "--port", "0"]
    assert main([*serve, "--api-key", "good", "--api-key", key]) == 1
    wanted = "cannot be sent in an HTTP header: expected printable ASCII, without spaces at its ends"
    assert f"error: --api-key {wanted}" in capsys.readouterr().err
    monkeypatch.setenv("CPMRT_API_KEY", key)
    assert main(serve) == 1
    assert f"error: CPMRT_API_KEY {wanted}" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "keys"), [((), ("own",)), (("--api-key", "a", "--api-key", "b"), ("a", "b"))])
def test_the_key_of_the_environment_counts_where_no_other_is_given(options, keys, monkeypatch):
    def refuse(settings):
        assert settings.api_keys == keys
        raise ConfigError("no port")

    monkeypatch.setattr("cpmrt.server.run.bind", refuse)
    monkeypatch.setenv("CPMRT_API_KEY", "own")
    assert main(["serve", "--port", "0", *options]) == 1


@pytest.mark.parametrize("key", ["ö", "a\tb"])
def test_a_key_of_a_file_that_no_header_can_carry_is_refused_by_its_line(key, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the office\nabc\n{key}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3 of --api-key-file .* cannot be sent in an HTTP header"):
        read_keys(path)


@pytest.mark.parametrize("key", ["", " "])
def test_a_key_that_is_empty_is_refused(key, capsys):
    """An empty key, as an unset variable gives, is refused, since it would let everybody in."""
    assert main(["serve", "/no/model", "--port", "0", "--api-key", key]) == 1
    assert "--api-key is empty" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " "])
def test_no_server_takes_a_key_that_is_none(key):
    """Empty keys are refused however a server is started, as Ray Serve's settings do not come from the command line."""
    with pytest.raises(ConfigError, match="an API key is empty"):
        ApiKeys(["sesame", key])


def test_every_name_of_the_model_is_taken_and_listed(guarded):
    cards = guarded.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["demo", "gpt-4o", "any"] and {card["root"] for card in cards} == {"demo"}
    assert guarded.client.get("/v1/models/any").json()["id"] == "any"
    for name in ("demo", "gpt-4o", "any"):
        assert guarded.chat(model=name).json()["model"] == "demo"
    refused = guarded.chat(model="gpt-4")
    assert refused.status_code == 404 and "'demo' and 'gpt-4o' and 'any'" in refused.json()["error"]["message"]


def test_pages_of_an_allowed_origin_may_ask_and_read(guarded):
    asking = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization,content-type"
    allowed = httpx.options(guarded.url + "/v1/chat/completions", headers=asking)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    asking["Access-Control-Request-Private-Network"] = "true"
    allowed = httpx.options(guarded.url + "/v1/chat/completions", headers=asking)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    if "allow_private_network" in signature(CORSMiddleware).parameters:
        assert allowed.headers["access-control-allow-private-network"] == "true"
        other = httpx.options(guarded.url + "/v1/models", headers={**asking, "Origin": "https://evil.example"})
        assert other.status_code == 400
    for headers, status in (({"x-api-key": "first"}, 200), ({}, 401)):
        answer = httpx.get(guarded.url + "/v1/models", headers={"Origin": ORIGIN} | headers)
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == ORIGIN


BROWSERS_SEND = [
    "https://example.org", "http://localhost:3000", "http://[::1]:8000", "https://xn--bcher-kva.example", "null", "*",
    "capacitor://localhost", "chrome-extension://abcdefgh", "safari-web-extension://AB-12", "app://.", "file://",
]  # fmt: skip
NO_BROWSER_SENDS = [
    "", "example.org", "localhost:3000", "https://", "https://example.org/", "https://example.org/app",
    "https://a@example.org", "https://Example.org", "HTTPS://example.org", "https://bücher.example",
    "https://example.org:443", "http://example.org:80", "https://*.example.org", "https://a.example,https://b.example",
    "https://a.example https://b.example", " https://example.org", "mailto:x",
]  # fmt: skip


@pytest.mark.parametrize("origin", BROWSERS_SEND)
def test_an_origin_that_browsers_send_is_taken(origin):
    parser = Parser()
    configure(parser)
    assert parser.parse_args(["--cors-origin", origin]).cors_origin == [origin]


@pytest.mark.parametrize("origin", NO_BROWSER_SENDS)
def test_an_origin_that_no_browser_sends_is_refused(origin, capsys):
    assert main(["serve", "/no/model", "--port", "0", "--cors-origin", origin]) == 2
    assert "--cors-origin: expected an origin as browsers send it, such as https://" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--served-model-name", "--allowed-host"])
@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_is_empty_is_refused(option, name, capsys):
    assert main(["serve", "/no/model", "--port", "0", option, name]) == 2
    assert f"{option}: expected a name, got {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.org:8000", "ab:80", "https://a.org", "a.org/x", "*.a.org", "[::1]:80", "[::1"])
def test_a_host_that_no_request_can_mean_is_refused(name, capsys):
    """An allowed host that no request can match is refused, as a Host header is compared without port, letter by
    letter."""
    assert main(["serve", "/no/model", "--port", "0", "--allowed-host", name]) == 2
    assert f"--allowed-host: expected a name or an address alone, got {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["example.org", "Example.org.", "my_box", "10.0.0.7", "fe80::1", "[fe80::1]"])
def test_a_host_that_requests_can_mean_is_taken(name):
    parser = Parser()
    configure(parser)
    assert parser.parse_args(["--allowed-host", name]).allowed_host == [name]


def test_other_origins_may_not(guarded, says):
    asking = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert httpx.options(guarded.url + "/v1/chat/completions", headers=asking).status_code == 400
    for server in (guarded, says):
        answer = httpx.get(server.url + "/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
    answer = httpx.options(says.url + "/v1/chat/completions", headers={**asking, "Origin": ORIGIN})
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers, "off unless asked for"


def test_https(tmp_path, certificate):
    cert, key = certificate
    tls_context(cert, key)
    trust = ssl.create_default_context(cafile=str(cert))
    with serving(lambda: saying_llm(tmp_path, lambda prompt: "secret"), ssl_certfile=cert, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, verify=trust)
        assert answer.status_code == 200 and '"content":"s"' in answer.text
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")


def test_a_certificate_that_cannot_serve_is_one_line_before_anything_is_loaded(tmp_path, certificate, capsys):
    cert, key = certificate
    (tmp_path / "empty.pem").write_text("")
    for options in (
        ["--ssl-certfile", "/nowhere.pem"],
        ["--ssl-certfile", str(cert)],
        ["--ssl-certfile", str(tmp_path / "empty.pem"), "--ssl-keyfile", str(key)],
        ["--ssl-keyfile", str(key)],
    ):
        assert main(["serve", "/no/model", "--port", "0", *options]) == 1
        error = capsys.readouterr().err
        assert error.startswith("cpmrt: error: --ssl-") and error.count("\n") == 1
