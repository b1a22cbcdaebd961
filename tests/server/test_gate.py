"""Who is let in: keys, sessions, and pages of other sites."""

from pathlib import Path
from typing import Any

import pytest

from splitinfer.cli.serve import ServeOptions
from splitinfer.cli.serving import gate_of
from splitinfer.errors import ConfigError
from splitinfer.server.gate import Facts, Gate, check_exposure, name_of, names_of
from splitinfer.server.keys import NOBODY, ApiKey, ApiKeys, Scope, digest, new_secret
from splitinfer.server.problem import Problem

JSON = "application/json"
HERE, NETWORK, ALL = "127.0.0.1", "192.168.0.2", "0.0.0.0"
ADMIN = ApiKey("admin", digest("boss"), frozenset({Scope.ADMIN}))
USER = ApiKey("laptop", digest("secret"))
KEYS = ApiKeys([ADMIN, USER])


def facts(method: str = "POST", **headers: str) -> Facts:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Facts(method, "/v1/models", {"host": "localhost:8080", "content-type": JSON, **named})


def status(call: Any, *args: Any) -> int:
    try:
        call(*args)
    except Problem as problem:
        return problem.status
    return 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 200),
        ({"host": "LocalHost."}, 200),
        ({"host": "mini.local:80"}, 200),
        ({"host": "attacker.example"}, 403),  # a name that was made to point here
        ({"host": "localhost.attacker.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:"}, 200),
        ({"host": "localhost:x"}, 403),
        ({"host": "localhost@attacker.example"}, 403),
        ({"host": "[::1]attacker.example"}, 403),
        ({"host": "[::1]:"}, 200),
        ({"host": "0.0.0.0:8080"}, 403),
        ({"origin": "http://localhost:8080"}, 200),  # this server's own page
        ({"origin": "http://localhost:9999"}, 403),  # another server on this machine
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "null"}, 403),  # a sandboxed frame, or a file
        ({"origin": "https://chat.example"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),  # an image, a script or a style of another site
        ({"sec_fetch_site": "same-site"}, 403),  # of another server on this machine
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none"}, 200),  # the address bar
        ({"sec_fetch_site": "cross-site", "origin": "https://chat.example"}, 200),
        ({"content_type": "application/json; charset=utf-8"}, 200),
        ({"content_type": "text/plain"}, 415),  # what a form of another site can send
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "application/x-www-form-urlencoded", "user_agent": "curl/8.7.1"}, 200),  # curl -d
        ({"content_type": "", "user_agent": "curl/8.7.1"}, 200),
        ({"content_type": "", "user_agent": "litellm/1.110.2"}, 200),  # to Ollama's API
        ({"content_type": "", "user_agent": "", "authorization": "Bearer x"}, 200),
        ({"content_type": "", "user_agent": "Mozilla/5.0"}, 415),  # a page's body without a type
        ({"content_type": "", "user_agent": ""}, 415),
        ({"content_type": "", "user_agent": "litellm/1.110.2", "origin": "http://localhost:8080"}, 415),
        ({"content_type": "application/x-www-form-urlencoded", "user_agent": "litellm/1.110.2"}, 415),
        ({"content_type": "text/plain", "user_agent": "curl/8.7.1"}, 415),
        ({"content_type": "", "user_agent": "curl/8.7.1", "sec_fetch_site": "none"}, 415),
    ],
)
def test_pages_of_other_sites_get_nothing(given: dict[str, str], expected: int):
    gate = Gate(frozenset({"mini.local"}), frozenset({"https://chat.example"}))
    assert status(gate.check_site, facts(**given)) == expected


@pytest.mark.parametrize(
    ("method", "mode", "destination", "expected"),
    [
        ("GET", "navigate", "document", 200),  # a link, which its reader follows
        ("GET", "navigate", "iframe", 403),
        ("GET", "no-cors", "image", 403),
        ("DELETE", "navigate", "document", 403),
    ],
)
def test_of_another_sites_pages_only_links_lead_here(method: str, mode: str, destination: str, expected: int):
    sent = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": mode, "sec-fetch-dest": destination}
    assert status(Gate().check_site, Facts(method, "/health", sent)) == expected


def test_reading_needs_no_content_type_and_who_speaks_http_1_0_no_host():
    assert status(Gate().check_site, Facts("GET", "/health", {"host": "localhost"})) == 200
    assert status(Gate().check_site, Facts("GET", "/health", {})) == 200


def test_names():
    assert Gate().caller(facts(), None) is NOBODY
    assert [name_of(host) for host in ("a.b:1", "[fe80::1%en0]:5", "A.B.", "")] == ["a.b", "fe80::1%en0", "a.b", ""]
    own = ["Mini", "mini.local", "192.168.0.2"]
    assert names_of(ALL, own, ["AI.example:443"]) == {"mini", "mini.local", "192.168.0.2", "ai.example"}
    assert names_of(HERE, own, []) == {HERE}


@pytest.mark.parametrize(
    ("host", "has_keys", "no_auth", "origins", "refused"),
    [
        (HERE, False, False, [], None),
        ("::1", False, False, [], None),
        (NETWORK, False, False, [], "anyone who can reach 192.168.0.2 could use this server"),
        (ALL, False, False, [], "anyone who can reach 0.0.0.0"),
        ("mini.local", False, False, [], "anyone who can reach mini.local"),
        (ALL, True, False, ["*"], None),
        (ALL, False, True, [], None),
        (HERE, True, True, [], "leave one of them out"),
        (HERE, False, False, ["https://chat.example"], None),
        (HERE, False, False, ["*"], "lets every page of the web use a server without keys"),
        (HERE, False, True, ["*"], None),
    ],
)
def test_no_more_than_was_said(host: str, has_keys: bool, no_auth: bool, origins: list[str], refused: str | None):
    if refused is None:
        check_exposure(host, has_keys=has_keys, no_auth=no_auth, origins=origins)
        return
    with pytest.raises(ConfigError, match=refused):
        check_exposure(host, has_keys=has_keys, no_auth=no_auth, origins=origins)


def test_a_key_that_can_be_guessed_is_said(caplog: pytest.LogCaptureFixture):
    assert gate_of(ServeOptions(host=HERE, api_key=["1234"]))
    assert gate_of(ServeOptions(host=NETWORK, api_key=[new_secret()]))
    assert not caplog.text
    assert gate_of(ServeOptions(host=NETWORK, api_key=[new_secret(), "1234"]))
    assert "a key of 4 characters can be found by trying" in caplog.text


def test_what_the_command_line_gives_makes_the_rules(tmp_path: Path):
    gate = gate_of(ServeOptions(host=NETWORK, api_key=["one", "two"], cors=["https://chat.example/"]))
    assert gate.keys.find("two") is not None
    assert gate.hosts == {NETWORK}
    assert gate.allows("https://chat.example")
    assert gate_of(ServeOptions()).keys is None
    for options, reason in (
        (ServeOptions(host=ALL), "anyone who can reach"),
        (ServeOptions(api_key=[" "]), "an API key is empty"),
        (ServeOptions(api_keys=tmp_path / "none"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            gate_of(options)
