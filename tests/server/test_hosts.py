"""The names in the Host header by which a server answers."""

from __future__ import annotations

import pytest
from serving import saying_llm, serving

from cpmrt.server.hosts import AllowedHosts, is_loopback

LOOPBACK = [
    "localhost", "LocalHost:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.1.2.3", "[::1]", "[::1]:8000",
    "[::ffff:127.0.0.1]", "",
]  # fmt: skip
OTHERS = [
    "127.evil.com", "127.0.0.1.evil.com", "127.0.0.1.evil.com:8000", "localhost.evil.com", "evil.com", "128.0.0.1",
    "[::2]", "[::ffff:128.0.0.1]", "127.0.0.1:80:80", "127.0.0.1@evil.com", "evil.com#localhost", "[::1", "a b",
    "127.0.0.1 evil.com", "localhost:port", "0177.0.0.1", "\xff",
]  # fmt: skip


@pytest.mark.parametrize("header", LOOPBACK)
def test_loopback_names_are_allowed(header):
    assert AllowedHosts(()).allow(header.encode("latin-1"))


@pytest.mark.parametrize("header", OTHERS)
def test_other_names_are_not(header):
    assert not AllowedHosts(("models.example", "::2:1")).allow(header.encode("latin-1"))


@pytest.mark.parametrize("header", ["models.example", "Models.Example:443", "models.example.", "[fe80::1]:8000"])
def test_given_names_are_allowed(header):
    assert AllowedHosts(("models.example", "fe80::1")).allow(header.encode())


def test_a_host_that_only_looks_like_loopback_is_open_to_others():
    assert is_loopback("127.0.0.5") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("127.evil.com") and not is_loopback("0.0.0.0") and not is_loopback("::")


def test_a_proxy_with_a_name_of_its_own_is_answered(tmp_path):
    with serving(lambda: saying_llm(tmp_path, str), allowed_hosts=("upstream",)) as server:
        def status(host):
            return server.client.get("/v1/models", headers={"host": host}).status_code

        hosts = ("upstream", "upstream:80", "127.0.0.1", "127.evil.com")
        assert [status(host) for host in hosts] == [200, 200, 200, 403]


@pytest.mark.parametrize(("keys", "expected"), [((), 403), (("k",), 200)])
def test_where_a_key_is_needed_any_name_will_do_unless_names_are_given(tmp_path, keys, expected):
    """A page that points a name of its own at this server has no key."""
    with serving(lambda: saying_llm(tmp_path, str), api_keys=keys) as server:
        headers = {"host": "models.example", "authorization": "Bearer k"}
        assert server.client.get("/v1/models", headers=headers).status_code == expected


def test_with_given_names_a_key_does_not_open_others(tmp_path):
    with serving(lambda: saying_llm(tmp_path, str), allowed_hosts=("upstream",), api_keys=("k",)) as server:
        def status(host):
            return server.client.get("/v1/models", headers={"host": host, "authorization": "Bearer k"}).status_code

        assert [status("upstream"), status("evil.com")] == [200, 403]
