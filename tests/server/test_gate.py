"""Who is let in: keys, sessions, and pages of other sites."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from splitinfer.errors import ConfigError
from splitinfer.server.gate import SESSION_COOKIE, Facts, Gate, is_loopback, name_of
from splitinfer.server.keys import NOBODY, ApiKey, ApiKeys, Scope, as_yaml, digest, new_secret, read_keys
from splitinfer.server.problem import Problem

JSON = "application/json"
ADMIN = ApiKey("admin", digest("boss"), frozenset({Scope.ADMIN}))
USER = ApiKey("laptop", digest("secret"))
KEYS = ApiKeys([ADMIN, USER])


def facts(method: str = "POST", **headers: str) -> Facts:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Facts(method, "/v1/models", {"host": "localhost:8080", "content-type": JSON, **named})


def status(call: Any, *args: Any) -> int:
    """The status with which a check ends; 200 if it lets pass."""
    try:
        call(*args)
    except Problem as problem:
        return problem.status
    return 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8080"}, 200),
        ({"host": "LocalHost."}, 200),
        ({"host": "mini.local:80"}, 200),
        ({"host": "attacker.example"}, 403),  # a name that was made to point here
        ({"host": "localhost.attacker.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:"}, 200),
        ({"host": "localhost:80:80"}, 403),
        ({"host": "localhost:x"}, 403),
        ({"host": "localhost@attacker.example"}, 403),
        ({"host": "localhost:80@attacker.example"}, 403),
        ({"host": "localhost/x"}, 403),
        ({"host": "[::1"}, 403),
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
        ({"content_type": ""}, 415),
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
        ("GET", "no-cors", "document", 403),
        ("DELETE", "navigate", "document", 403),
    ],
)
def test_of_another_sites_pages_only_links_lead_here(method: str, mode: str, destination: str, expected: int):
    sent = {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": mode, "sec-fetch-dest": destination}
    assert status(Gate().check_site, Facts(method, "/health", sent)) == expected


def test_reading_needs_no_content_type():
    assert status(Gate().check_site, Facts("GET", "/health", {"host": "localhost"})) == 200


@pytest.mark.parametrize(
    ("headers", "cookies", "found"),
    [
        ({"authorization": "Bearer secret"}, {}, "laptop"),
        ({"authorization": "bearer  secret "}, {}, "laptop"),
        ({"x_api_key": "secret"}, {}, "laptop"),
        ({}, {SESSION_COOKIE: "s1"}, "laptop"),
        ({"authorization": "Bearer wrong"}, {SESSION_COOKIE: "s1"}, 401),
        ({"authorization": "Basic secret"}, {}, 401),
        ({"authorization": "Bearer "}, {}, 401),
        ({"authorization": f"Bearer {USER.sha256}"}, {}, 401),  # what the file holds is no key
        ({}, {SESSION_COOKIE: "s2"}, 401),
        ({}, {}, 401),
    ],
)
def test_a_caller_shows_a_key_or_has_a_session(headers: dict[str, str], cookies: dict[str, str], found: str | int):
    asked = facts(**headers)
    asked = Facts(asked.method, asked.path, asked.headers, cookies)
    try:
        sessions = SimpleNamespace(key_of={"s1": USER}.get)
        got: str | int = Gate(keys=KEYS).caller(asked, sessions).name
    except Problem as problem:
        got = problem.status
    assert got == found


def test_scopes():
    gate = Gate(keys=KEYS)
    assert status(gate.caller, facts(authorization="Bearer secret"), None, Scope.ADMIN) == 403
    assert status(gate.caller, facts(authorization="Bearer boss"), None, Scope.ADMIN) == 200
    assert status(gate.caller, facts(authorization="Bearer boss"), None, Scope.USE) == 200


def test_where_no_key_is_needed_anybody_may_do_anything():
    assert Gate().caller(facts(), None) is NOBODY
    assert NOBODY.may(Scope.ADMIN)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.2", False), ("mini.local", False)],
)  # fmt: skip
def test_loopback(host: str, local: bool):
    assert is_loopback(host) == local


def test_names():
    assert [name_of(host) for host in ("a.b:1", "[fe80::1%en0]:5", "A.B.", "")] == ["a.b", "fe80::1%en0", "a.b", ""]


# -- the file --------------------------------------------------------------------------------------


def test_a_file_holds_what_was_made_and_no_key(tmp_path: Path):
    secret = new_secret()
    made = [ApiKey("phone", digest(secret), frozenset({Scope.USE}), 60.0, 4), ADMIN]
    path = tmp_path / "keys.yaml"
    path.write_text(as_yaml(made))
    assert secret not in path.read_text()
    assert read_keys(path) == made
    assert ApiKeys(read_keys(path)).find(secret) == made[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must hold a list of API keys"),
        ("a: 1", "must hold a list of API keys"),
        ("[1]", "key 1 of .*: it must have name and sha256, and may have scopes"),
        ("- {name: a, sha256: b}", "key 1 of .*: the sha256 of key 'a' must be 64 hexadecimal digits"),
        ("- {name: a, sha256: %s, scopes: [rule]}", "scopes must be a list of use, admin, metrics"),
        ("- {name: a, sha256: %s, scopes: []}", "key 'a' has no scope"),
        ("- {name: a, sha256: %s, concurrent: 0}", "concurrent of key 'a' must be a number over 0, not 0"),
        ("- {name: a, sha256: %s, concurrent: 1.5}", "concurrent of key 'a' must be a whole number"),
        ("- {name: a, sha256: %s, requests_per_minute: many}", "requests_per_minute of key 'a' must be a number"),
        ("- {name: a, sha256: %s, extra: 1}", "and may have scopes, requests_per_minute, concurrent"),
        ("- {name: '', sha256: %s}", "a key needs a name"),
        ("- [", "cannot be read"),
        ("- 2026-13-01", "cannot be read: month must be in 1..12"),
        ("[" * 5000, "cannot be read"),
        ('- !!int ""', "cannot be read"),
        ("- !!timestamp x", "cannot be read"),
        ("- !!bool x", "cannot be read"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("%s", "a" * 64))
    with pytest.raises(ConfigError, match=reason):
        read_keys(path)


def test_names_are_unique():
    with pytest.raises(ConfigError, match="two API keys 'laptop'"):
        ApiKeys([USER, ApiKey("laptop", digest("other"))])
    with pytest.raises(ConfigError, match="one key under two names"):
        ApiKeys([USER, ApiKey("phone", USER.sha256)])
