"""Which request of whom gets which status, for every route of the real application: docs/server-access.md.

python -m tests.server.access_table --write
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "server"), str(_TESTS)]

from asgi import answer  # noqa: E402
from mutating import BODIES, JSON, Asked  # noqa: E402
from starlette.routing import Router  # noqa: E402

from splitinfer.llm import LLM  # noqa: E402
from splitinfer.server.app import make_app  # noqa: E402
from splitinfer.server.gate import SESSION_COOKIE, Gate  # noqa: E402
from splitinfer.server.guard import Guard  # noqa: E402
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest  # noqa: E402
from splitinfer.server.route import ApiRoute  # noqa: E402
from splitinfer.server.service import Service  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server-access.md"
_BEGIN, _END = "<!-- table: begin -->\n\n", "\n<!-- table: end -->"
_KEY, _SESSION, _USER = ("X-Api-Key", "secret"), "{session}", ApiKey("laptop", digest("secret"))
_METER = ApiKey("prometheus", digest("figures"), frozenset({Scope.METRICS}))
_ADMIN = ApiKey("owner", digest("dials"), frozenset({Scope.ADMIN}))
_CHANGES: dict[str, dict[str, Any]] = {"/v1/splitinfer/dials": {"prefill_share": None}}
_COOKIE = ("Cookie", f"{SESSION_COOKIE}={_SESSION}")
_TRICKS = ("localhost:80:80", "localhost@attacker.example", "localhost:80@attacker.example", "[::1]attacker.example",
           "[::1", "localhost.attacker.example", "127.0.0.1.attacker.example", "0.0.0.0", "",
           "localhost:x")  # fmt: skip

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Who:
    """A column: who asks, and with which headers; several ones must all get the same."""

    name: str
    headers: Sequence[Headers]
    without_keys: bool = True  # whether it says anything of a server without keys
    method: str | None = None


def _with_key(*more: tuple[str, str]) -> Headers:
    return (_KEY, *more)


WHO = (
    Who("no key", [()], without_keys=False),
    Who("wrong key", [
        (("X-Api-Key", "wrong"),), (("Authorization", "Bearer wrong"),), (("X-Api-Key", "wrong"), _COOKIE)
        ], without_keys=False),
    Who("key", [_with_key(), (("Authorization", "Bearer secret"),)], without_keys=False),
    Who("key for figures", [(("Authorization", "Bearer figures"),)], without_keys=False),
    Who("key for dials", [(("Authorization", "Bearer dials"),)], without_keys=False),
    Who("session", [(_COOKIE,), (_COOKIE, ("Origin", "http://localhost"), ("Sec-Fetch-Site", "same-origin"))]
        , without_keys=False),
    Who("session, from another site", [
        (_COOKIE, ("Origin", "https://attacker.example")), (_COOKIE, ("Sec-Fetch-Site", "cross-site")),
        (_COOKIE, ("Origin", "http://localhost:9999")), (_COOKIE, ("Sec-Fetch-Site", "same-site"))]
        , without_keys=False),
    Who("local program", [(), (("Host", "127.0.0.1:8080"),), (("Host", "[::1]:8080"),)]),
    Who("page of another site", [
        _with_key(("Origin", "https://attacker.example")), _with_key(("Sec-Fetch-Site", "cross-site")),
        _with_key(("Origin", "http://localhost:9999"))]),
    Who("origin null", [_with_key(("Origin", "null"))]),
    Who("rebound name", [_with_key(("Host", "attacker.example")),
                         _with_key(("Host", "attacker.example"), ("Origin", "http://attacker.example"))]),
    Who("tricks with names", [_with_key(("Host", host)) for host in _TRICKS]),
    Who("name of `--allow-host`", [_with_key(("Host", "ai.example")), _with_key(("Host", "AI.example.:443"))]),
    Who("page of `--cors`", [_with_key(("Origin", "https://chat.example"))]),
    Who("body as text", [_with_key(("Content-Type", "text/plain")),
                         _with_key(("Content-Type", "application/x-www-form-urlencoded"))]),
    Who("preflight", [(("Origin", "https://attacker.example"), ("Access-Control-Request-Method", "POST"))],
        method="OPTIONS"),
    Who("preflight of `--cors`", [(("Origin", "https://chat.example"), ("Access-Control-Request-Method", "POST"))],
        method="OPTIONS"),
)  # fmt: skip


def routes_of(application: Guard) -> list[tuple[str, str]]:
    """Every method and path of an application."""
    router = application._app
    assert isinstance(router, Router)
    routes = [route for route in router.routes if isinstance(route, ApiRoute)]
    return sorted((path, method) for one in routes for method in one.methods or () for path in [one.path])


def applications(llm: LLM) -> dict[str, Guard]:
    """A server with keys, and one without."""
    hosts, origins = frozenset({"ai.example"}), frozenset({"https://chat.example"})
    keyed = Service(llm, "demo", Gate(hosts, origins, ApiKeys([_USER, _METER, _ADMIN])))
    return {"with keys": make_app(keyed), "without keys": make_app(Service(llm, "demo", Gate(hosts, origins)))}


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """The same request for one token, and no stream."""
    changes = {"stream": False, "n": 1, "max_tokens": 1, "max_output_tokens": 1, "prompt": "x", "echo": False}
    return body | {name: value for name, value in changes.items() if name in body}


def _asked(path: str, method: str, headers: Headers) -> Asked:
    given = {name for name, _ in headers}
    asks = {"POST": BODIES, "PATCH": _CHANGES}.get(method, {}).get(path)
    body = b"" if asks is None else json.dumps(_short(asks)).encode()
    declared = () if not body or "Content-Type" in given else (JSON,)
    name = "site/index.html" if path.startswith("/page/") else "demo"
    target = path.replace("{request_id}", "x").replace("{name:path}", name)
    return Asked(method, target, (*declared, *headers), body)


async def status_of(application: Guard, path: str, method: str, who: Who) -> str:
    """The status that somebody gets; several, with a stroke between, where the ways differ."""
    found: list[str] = []
    for headers in who.headers:
        session = application._sessions.begin(_USER)  # type: ignore[attr-defined]
        named = tuple((name, value.replace(_SESSION, session)) for name, value in headers)
        said = await answer(application, _asked(path, who.method or method, named))
        found.append(str(said.status))
    return "/".join(dict.fromkeys(found))


async def _rows(application: Guard, columns: Sequence[Who]) -> list[list[str]]:
    rows = [["route", *(who.name for who in columns)], ["---"] * (len(columns) + 1)]
    for path, method in routes_of(application):
        shown = path.replace("{request_id}", "ID").replace("{name:path}", "NAME")
        rows.append([f"`{method} {shown}`", *[await status_of(application, path, method, who) for who in columns]])
    return rows


def tables(llm: LLM) -> str:
    """Both tables."""
    made = []
    for name, application in applications(llm).items():
        columns = [who for who in WHO if who.without_keys or name == "with keys"]
        rows = ["| " + " | ".join(row) + " |" for row in asyncio.run(_rows(application, columns))]
        made.append(f"## A server {name}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(made)


def on_page() -> str:
    """The tables as the page has them."""
    return PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]


def write(text: str) -> None:
    """Put the tables on the page."""
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: _BEGIN + text + _END, page, flags=re.DOTALL))


if __name__ == "__main__":
    from stages import pipeline

    from splitinfer.demo import TARGET

    with pipeline(TARGET, [6, 6]) as running:
        if "--write" in sys.argv:
            write(tables(running))
        else:
            print(tables(running))  # noqa: T201
