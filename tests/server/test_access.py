"""Which request of whom is answered, for every route of the real application: the table in docs/use/server-access.md.

A page of another site gets nothing anywhere, whatever it knows.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from asgi import told
from valid_requests import BODIES

from splitinfer.llm import LLM
from splitinfer.server.gate import SESSION_COOKIE, Gate
from splitinfer.server.guard import Guard
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

DOCS = Path(__file__).resolve().parents[2] / "docs" / "use" / "server-access.md"
KEYS = {scope: ApiKey(scope, digest(f"for {scope}"), frozenset({scope})) for scope in Scope}
HOSTS, ORIGINS = frozenset({"ai.example"}), frozenset({"https://chat.example"})
KEY = ("X-Api-Key", "for admin")
Headers = tuple[tuple[str, str], ...]


@pytest.fixture(scope="module")
def applications(llm: LLM) -> tuple[Guard, Guard]:
    gates = (Gate(HOSTS, ORIGINS, ApiKeys(KEYS.values())), Gate(HOSTS, ORIGINS))
    with_keys, without = (make_app(Service(llm, "demo", gate)) for gate in gates)
    return with_keys, without


def routes_of(application: Guard) -> Iterator[tuple[str, str]]:
    for route in application._app.routes:
        yield from ((method, route.path) for method in route.methods or ())


def status(application: Guard, method: str, path: str, headers: Headers = ()) -> int:
    changes = {"stream": False, "n": 1, "max_tokens": 1, "max_output_tokens": 1, "prompt": "x", "echo": False}
    asks = {**BODIES.get(path, {}), **({"prefill_share": None} if path.endswith("dials") else {})}
    body = json.dumps(asks | {name: changes[name] for name in changes if name in asks}).encode()
    target = path.replace("{request_id}", "x").replace("{name:path}", "site/index.html").replace("{name}", "demo")
    has_body = method in ("POST", "PATCH")
    return told(application, target, body if has_body else None, *headers, method=method).status


def table() -> dict[str, list[str]]:
    """The page's table: by method and path, or path alone, what `no key`, three scopes and a session get."""
    lines = DOCS.read_text().partition("| request | no key |")[2].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return {name: cells for names, *cells in rows for name in re.findall("`([^`]+)`", names) or ["others"]}


def test_the_page_says_who_may_what(applications: tuple[Guard, Guard]):
    application, rows, seen = applications[0], table(), set[str]()
    for method, path in routes_of(application):
        shown = re.sub("{name:path}", "FILE", path)
        name = next((one for one in (f"{method} {shown}", shown) if one in rows), "others")
        seen.add(name)
        session = application._sessions.begin(KEYS[Scope.USE])  # type: ignore[attr-defined]
        bearers: list[Headers] = [(("Authorization", f"Bearer for {scope}"),) for scope in ("metrics", "use", "admin")]
        cookie = ("Cookie", f"{SESSION_COOKIE}={session}")
        for who, may in zip([(), *bearers, (cookie,)], rows[name], strict=True):
            found = status(application, method, path, who)
            assert (found not in (401, 403)) == (may == "yes"), (method, path, who, found)
        if rows[name][0] != "yes":
            for wrong in ((), (("X-Api-Key", "wrong"),), (("X-Api-Key", "wrong"), cookie)):
                assert status(application, method, path, wrong) == 401, (method, path, wrong)
    assert seen == set(rows)


def test_the_table_of_routes_has_every_route(applications: tuple[Guard, Guard]):
    written = re.sub("^.*?## Routes\n|\n## .*", "", (DOCS.parent / "server.md").read_text(), flags=re.DOTALL)
    shown = {re.sub(r"\b[A-Z]{2,}$", "{}", name) for name in re.findall("`([A-Z]+ /[^`]*)`", written)}
    of_server = {f"{method} {re.sub('{.*}', '{}', path)}" for method, path in routes_of(applications[0])}
    heads = {f"HEAD {name.removeprefix('GET ')}" for name in of_server if name.startswith("GET ")}
    assert of_server - heads - {"POST /chat/completions"} == shown


FOREIGN: list[Headers] = [
    (KEY, ("Origin", "https://attacker.example")),
    (KEY, ("Sec-Fetch-Site", "cross-site")),
    (KEY, ("Host", "attacker.example")),  # its own name points here; more of all three are in `test_gate.py`
]


def test_a_page_of_another_site_gets_nothing(applications: tuple[Guard, Guard]):
    for application in applications:
        for method, path in routes_of(application):
            for who in FOREIGN:
                assert status(application, method, path, who) == 403, (method, path, who)
            for kind in ("text/plain", "application/x-www-form-urlencoded"):
                if method in ("POST", "PATCH"):
                    assert status(application, method, path, (KEY, ("Content-Type", kind))) == 415, (method, path)
            for origin, expected in (("https://attacker.example", 403), ("https://chat.example", 204)):
                preflight = (("Origin", origin), ("Access-Control-Request-Method", method))
                assert status(application, "OPTIONS", path, preflight) == expected, (method, path)


def test_an_allowed_page_is_told_so(applications: tuple[Guard, Guard]):
    origin = ("Origin", "https://chat.example")
    asks = (origin, ("Access-Control-Request-Method", "POST"))
    preflight = told(applications[0], "/v1/chat/completions", None, *asks, method="OPTIONS")
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in preflight.headers
    refused = told(applications[0], "/v1/models", None, origin)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")
