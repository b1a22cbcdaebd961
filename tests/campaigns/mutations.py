"""Damaged requests over raw sockets against a real server of two stages.

A valid request of any route is damaged in one of three places, sometimes in several; the same seed, the same bytes:

    body   at any place of its JSON another value, a name that nobody knows, or nothing; or its bytes are
    head   its method, its target, its headers
    wire   the bytes of HTTP: lengths, chunks, lines, several requests at once, other protocols

Each must be answered within ten seconds, never with a status of 500 or more, and refusals in the form of the API that
was asked; afterwards the connection is usable, or closed. In the end: the process's memory is where it was after half
of the requests, its log has no traceback, nothing is under way, and 100 valid requests are answered as before.
"""

import copy
import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import fuzz
from processes import Running
from raw_http import Connection, Exchange, Said
from valid_requests import BODIES, JSON, Asked, places, trouble_with

from .report import Report

_SECONDS = 10.0  # for an answer
_TIMEOUT = ("X-Splitinfer-Timeout", "3")  # a request that lost its max_tokens ends
_MOST_GROWTH = 32 << 20  # bytes of the process's memory
_WRONG_IN_LOG = re.compile(r"Traceback|failed: \w+Error|Exception|never retrieved")
_VARIES = "id|created|created_at|completed_at|call_id|item_id|cached_tokens|(cache_read_)?input_tokens"
_NOT_SAME = rf'"({_VARIES})": ?("[^"]*"|[\d.]+)'
_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
_NO_HTTP = b"Invalid HTTP request received."


@dataclass(frozen=True)
class Sent:
    """What goes over a socket. ``paths_are_anthropic``: of each request in it, as far as it can be told.
    ``num_answers``: if that many must come; ``None``: up to the server, which may also close."""

    raw: bytes
    paths_are_anthropic: tuple[bool, ...]
    num_answers: int | None
    what: str


def valid(chance: random.Random) -> Asked:
    if chance.random() < 0.1:
        method, path = chance.choice(_WITHOUT_BODY)
        return Asked(method, path)
    path = chance.choice([*BODIES])
    body = dict(BODIES[path])
    if "stream" in body:
        body["stream"] = chance.random() < 0.5
    return Asked("POST", path, (JSON, _TIMEOUT), json.dumps(body).encode())


def damaged(chance: random.Random) -> Asked:
    """A request that is whole as HTTP."""
    asked = valid(chance)
    if asked.method == "POST" and chance.random() < 0.75:
        body, what = _damaged_values(chance, json.loads(asked.body))
        asked = asked.and_then(what, body=body)
    if asked.method == "POST" and chance.random() < 0.2:
        kind, change = chance.choice([*_DAMAGED_BYTES.items()])
        asked = asked.and_then(kind, body=change(asked.body, chance))
    if asked.what == "valid" or chance.random() < 0.25:
        asked = _damaged_head(chance, asked)
    return asked


def sent(chance: random.Random) -> Sent:
    kind, asked = chance.random(), damaged(chance)
    if kind < 0.6:
        return Sent(written(asked), (asked.is_anthropic,), 1 if _is_plain(asked) else None, asked.what)
    if kind < 0.75:  # several at once
        several = [damaged(chance) if chance.random() < 0.5 else valid(chance) for _ in range(chance.choice((2, 3, 8)))]
        several = [one for one in several if _is_plain(one)] or [valid(chance)]
        what = "; ".join(one.what for one in several)
        raw = b"".join(map(written, several))
        return Sent(raw, tuple(one.is_anthropic for one in several), len(several), f"pipelined {what}")
    asked = asked if chance.random() < 0.3 else valid(chance)
    name, make = chance.choice([*_wire_kinds(chance, asked).items()])
    is_whole = name.startswith(_WHOLE) and _is_plain(asked)
    is_anthropic = asked.is_anthropic and name not in _NO_REQUESTS
    return Sent(make(), (is_anthropic,), 1 if is_whole else None, f"wire {name}: {asked.what}")


# -- bodies ----------------------------------------------------------------------------------------

_WITHOUT_BODY = (("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("GET", "/health"), ("DELETE", "/v1/requests/x"),
                 ("DELETE", "/session"))  # fmt: skip
_RAW = "@raw@"  # stands for bytes that no JSON writer makes
_SMALL: tuple[bytes, ...] = (
    b"null", b"true", b"false", b"0", b"-0", b"-1", b"1", b"1.5", b"1e-9", b"2147483648", b"9223372036854775808",
    b"18446744073709551616", b"-9223372036854775809", b"1e308", b"-1e308", b"1e400", b"-1e400", b"NaN", b"Infinity",
    b"-Infinity", b"1" + b"0" * 400, b"9" * 5000, b"0x10", b"1_000", b"01", b"+1", b".5", b'""', b'"x"', b'"0"', b'" "',
    b'"\\ud800"', b'"\\udc00x"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\x00"', b'"\\u202e\\ufeff"', b'"\xff\xfe"',
    b'"\xed\xa0\x80"', b'"<|im_start|>system"', b'"{{ 7*7 }}{% for x in range(9999999) %}"', b'"%s%n{0}"', b"[]",
    b"[[]]",
    b"{}", b'{"": null}', b'{"type": []}', b'{"type": {}}', b'{"type": "text"}', b'["x"]', b"[null]", b"[1, 2, 3]",
    b'[{"role": "user"}]', b'[{"type": "text", "text": 1}]', b'{"__proto__": 1, "__class__": 2}', b'"\\"', b"'x'",
    b"[" * 40 + b"]" * 40, b"[" * 70 + b"]" * 70, b'{"a": ' * 30 + b"1" + b"}" * 30,
)  # fmt: skip
_LARGE: tuple[Callable[[int], bytes], ...] = (  # with about so many bytes
    lambda size: b'"' + b"a" * size + b'"',
    lambda size: b'"' + b"ab cd " * (size // 6) + b'"',
    lambda size: b"[" + b",".join([b"{}"] * (size // 3)) + b"]",
    lambda size: b"{" + b",".join(b'"%d":1' % i for i in range(size // 10)) + b"}",
    lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    lambda size: b"[" + b",".join([b'{"role":"user","content":"x"}'] * (size // 30)) + b"]",
)
_NAMES = (
    "surprise", "", "__class__", "\u0000", "a" * 5000, "chat_template", "tokenize", "return_tensors", "max_length",
    "conversation", "continue_final_message", "messages", "documents", "add_generation_prompt", "self", "tools",
    "raise_exception", "bos_token", "9" * 5000, "-1", "\u0661", "type", "token_ids",
)  # fmt: skip


def _damaged_values(chance: random.Random, body: dict[str, Any]) -> tuple[bytes, str]:
    """The JSON of a body with one to three strange places."""
    made, raw, what = copy.deepcopy(body), list[bytes](), list[str]()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        *path, last = chance.choice([*places(made)] or [("surprise",)])
        inside: Any = made
        for key in path:
            inside = inside[key]
        kind = chance.random()
        if kind < 0.15 and made:
            del inside[last]
            what.append(f"without {path}.{last}")
            continue
        name = chance.choice(_NAMES) if kind < 0.3 and isinstance(inside, dict) else last
        size = chance.choice((6_000, 100_000, 1_000_000, 10_000_000))
        raw.append(chance.choice(_SMALL) if chance.random() < 0.98 else chance.choice(_LARGE)(size))
        inside[name] = f"{_RAW}{len(raw) - 1}"
        what.append(f"{path}.{name!s:.20}={raw[-1][:24]!r}")
    text = json.dumps(made).encode()
    for i, value in enumerate(raw):
        text = text.replace(f'"{_RAW}{i}"'.encode(), value)
    return text, ", ".join(what)


_DAMAGED_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "mutated": fuzz.mutate,
    "empty": lambda *_: b"",
    "cut off": lambda body, chance: body[: chance.randrange(len(body) + 1)],
    "twice": lambda body, _: body + body,
    "mark of order": lambda body, _: b"\xef\xbb\xbf" + body,
    "gzip": lambda body, _: gzip.compress(body, 1),
    "utf-16": lambda body, _: body.decode("utf-8", "replace").encode("utf-16"),
    "in a list": lambda body, _: b"[" + body + b"]",
    "a name twice": lambda body, _: b'{"model": 1, ' + body[1:],
    "a comma more": lambda body, _: body[:-1] + b",}",
    "form": lambda *_: b"model=m&messages=x",
    "a value": lambda _, chance: chance.choice(_SMALL),
}


# -- head ------------------------------------------------------------------------------------------

_METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "post", "P" * 3000)
_TARGETS: tuple[Callable[[str], str], ...] = (
    lambda path: path + "/", lambda path: "/" + path, lambda path: path.replace("/", "//"),
    lambda path: "/x/.." + path, lambda path: "/x/%2e%2e" + path, lambda path: path.replace("/v1", "/%76%31"),
    lambda path: path.replace("/", "%2f"), lambda path: path + "%00", lambda path: path + "%0d%0aX-A:%20b",
    lambda path: path + "%ff%fe", lambda path: path + "%", lambda path: path + "%zz", lambda path: path + ";a=b",
    lambda path: path + "?" + "a=b&" * 2000, lambda path: path + "?a=%ff", lambda path: path + "#x",
    lambda path: "http://localhost" + path, lambda path: "http://attacker.example" + path,
    lambda path: "https://[::1" + path, lambda _: "*", lambda _: "localhost:80", lambda path: path + "a" * 30_000,
    lambda path: path.upper(), lambda path: "/v1/models/" + "..%2f" * 9 + "etc/passwd", lambda _: "/",
    lambda path: "/v1/messages/../chat" + path, lambda path: path + "/%E2%80%AE",
)  # fmt: skip
_HEADERS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("Host", "[::1"),), (("Host", "localhost@evil.example"),), (("Host", ""),),
    (("Host", "localhost"), ("Host", "localhost")), (("Content-Type", "text/plain"),), (("Content-Type", ""),),
    (("Content-Type", "application/json"), ("Content-Type", "text/plain")), (("Origin", "null"),),
    (("Origin", "http://localhost"), ("Origin", "https://evil.example")), (("Cookie", ";;;=;==,\x01"),),
    (("Cookie", 'a="' + "\\" * 60_000 + '"'),), (("Authorization", "Bearer " + "k" * 20_000),),
    (("Authorization", "\x80\xff"),), (("X-Api-Key", "a"), ("X-Api-Key", "b")), (("X-Request-Id", "x" * 5000),),
    (("X-Splitinfer-Priority", "1e400"),), (("X-Splitinfer-Priority", "\u00b2"),), (("X-Splitinfer-Timeout", "-1"),),
    (("X-Splitinfer-Timeout", "Infinity"),), (("X-Large", "a" * 60_000),), tuple((f"X-{i}", "a") for i in range(500)),
    (("Connection", "close"),), (("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")),
    (("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQCAAAAAAIAAAAA")),
    (("Expect", "100-continue"),), (("Content-Encoding", "gzip"),), (("Range", "bytes=0-1"),),
    (("X-Forwarded-For", "[::"),), (("Access-Control-Request-Method", "POST"), ("Origin", "null")),
    (("X-A", "\x80\xfe"),), (("Sec-Fetch-Site", "cross-site"),),
)  # fmt: skip


def _damaged_head(chance: random.Random, asked: Asked) -> Asked:
    kind = chance.random()
    if kind < 0.2:
        method = chance.choice(_METHODS)
        return asked.and_then(f"method {method[:9]}", method=method)
    if kind < 0.45:
        at = chance.randrange(len(_TARGETS))
        return asked.and_then(f"target {at}", target=_TARGETS[at](asked.target))
    more = chance.choice(_HEADERS)
    kept = tuple(one for one in asked.headers if one[0] not in {name for name, _ in more})
    return asked.and_then(f"headers {more[0][0]}: {more[0][1][:24]!r}", headers=kept + more)


def _is_plain(asked: Asked) -> bool:
    """Whether a request is one as HTTP has them, so that it must be answered and the next one, too."""
    names = [name.lower() for name, _ in asked.headers]
    values = "".join(value for _, value in asked.headers)
    return (
        names.count("host") < 2
        and not {"connection", "expect", "upgrade", "cookie"} & {*names}
        and all(" " <= letter < "\x7f" for letter in values)
        and asked.method not in ("CONNECT", "HEAD")
        and len(asked.target) + len(values) + len(asked.method) < 30_000
        and len(names) < 100
    )


# -- wire ------------------------------------------------------------------------------------------


def written(asked: Asked, *framing: str, version: str = "HTTP/1.1", body: bytes | None = None) -> bytes:
    """A request's bytes. ``framing``: the lines that say how long the body is; its true length if not given."""
    names = {name.lower() for name, _ in asked.headers}
    host = () if "host" in names else ("Host: localhost",)
    lines = [f"{asked.method} {asked.target} {version}", *host, *(f"{name}: {value}" for name, value in asked.headers)]
    length = framing or ((f"Content-Length: {len(asked.body)}",) if asked.body or asked.method == "POST" else ())
    head = "\r\n".join([*lines, *length, "", ""]).encode("latin-1")
    return head + (asked.body if body is None else body)


def chunked(body: bytes, sizes: Sequence[int]) -> bytes:
    made, at, i = [], 0, 0
    while at < len(body):
        part = body[at : at + sizes[i % len(sizes)]]
        made.append(b"%x\r\n%b\r\n" % (len(part), part))
        at, i = at + len(part), i + 1
    return b"".join(made) + b"0\r\n\r\n"


_TE = "Transfer-Encoding: chunked"
_WHOLE = "whole"
_NO_REQUESTS = ("http2", "tls", "noise", "nothing")


def _wire_kinds(chance: random.Random, asked: Asked) -> dict[str, Callable[[], bytes]]:
    """Damages of HTTP itself. Those whose name begins with ``whole`` are answered."""
    body, size = asked.body, len(asked.body)
    short = asked if size < 100_000 else replace(asked, body=b"{}")  # a byte at a time
    return {
        "whole chunked": lambda: written(short, _TE, body=chunked(short.body, (1, 7, 4096))),
        "whole 1.0": lambda: written(asked, version="HTTP/1.0"),
        "length short": lambda: written(asked, f"Content-Length: {size // 2}"),
        "length long": lambda: written(asked, f"Content-Length: {size + 9}"),
        "length twice": lambda: written(asked, f"Content-Length: {size}", f"Content-Length: {size + 1}"),
        "length and chunked": lambda: written(short, f"Content-Length: {size}", _TE, body=chunked(short.body, (9,))),
        "chunk size wrong": lambda: written(asked, _TE, body=b"5\r\n" + body + b"\r\n0\r\n\r\n"),
        "chunk size huge": lambda: written(asked, _TE, body=b"f" * chance.choice((7, 15, 40)) + b"\r\n" + body),
        "chunks never end": lambda: written(asked, _TE, body=b"1\r\n{\r\n"),
        "folded": lambda: written(asked, "X-Fold: a\r\n b", f"Content-Length: {size}"),
        "bare line ends": lambda: written(asked).replace(b"\r\n", b"\n", 9),
        "nul in head": lambda: written(asked, "X-A: \x00", f"Content-Length: {size}"),
        "head cut off": lambda: written(asked)[: chance.randrange(1, 60)],
        "head huge": lambda: written(asked, "X-A: " + "a" * 80_000, f"Content-Length: {size}"),
        "version": lambda: written(asked, version=chance.choice(("HTTP/2.0", "HTTP/0.9", "ICY", "", "HTTP/1.1 x"))),
        "http2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(60),
        "tls": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
        "noise": lambda: chance.randbytes(chance.choice((1, 30, 3000))),
        "blank lines": lambda: b"\r\n" * chance.choice((1, 3, 500)) + written(asked),
        "nothing": lambda: b"",
    }  # fmt: skip


# -- what must come of it --------------------------------------------------------------------------


def verdict(sent: Sent, came: Exchange) -> str | None:
    """What is wrong with the answers to what was sent over one connection, if anything."""
    if came.trouble is not None:
        return came.trouble
    is_head = sent.raw.lstrip().startswith(b"HEAD ")  # whose answers have no body
    for i, said in enumerate(came.answers):
        if is_head and "x-request-id" in said.headers:
            continue
        is_anthropic = sent.paths_are_anthropic[min(i, len(sent.paths_are_anthropic) - 1)]
        if (wrong := _trouble(said, is_anthropic, b"" if is_head else _NO_HTTP)) is not None:
            return f"answer {i}: {wrong}"
    if sent.num_answers is None or len(came.answers) >= sent.num_answers or _closes(came):
        return None
    return f"{len(came.answers)} answers of {sent.num_answers}, and closed"


def _trouble(said: Said, is_anthropic: bool, no_http: bytes) -> str | None:
    """``no_http``: what a reader of the answer sees of the body that refuses bytes that are no HTTP."""
    if "x-request-id" in said.headers:
        return trouble_with(said.status, said.headers, said.json, is_anthropic=is_anthropic)
    is_refusal = (said.status, said.headers.get("connection")) == (400, "close") and said.body == no_http
    return None if is_refusal else f"{said.status} without an id: {said.body[:80]!r}"


def _closes(came: Exchange) -> bool:
    return bool(came.answers) and came.answers[-1].headers.get("connection") == "close"


def try_one(port: int, what: Sent) -> tuple[Exchange, str | None]:
    """Send it over a connection of its own; what came, and what was wrong, if anything."""
    with Connection(port, _SECONDS) as connection:
        came = connection.exchange(what.raw, what.num_answers)
        wrong = verdict(what, came)
        if wrong is None and what.num_answers is not None and not came.is_closed and not _closes(came):
            again = connection.exchange(_HEALTH, 1)
            if [said.status for said in again.answers] != [200]:
                wrong = f"the connection is not usable afterwards: {again}"
    return came, wrong


def valid_answers(port: int) -> list[tuple[str, int, str]]:
    """What 100 greedy requests of all routes are answered, without what differs from time to time."""
    found = []
    for path, body in [*BODIES.items()] * 10:
        greedy = {name: 0 if name == "temperature" else value for name, value in body.items() if name != "stream"}
        with Connection(port, 60) as connection:
            asked = Asked("POST", path, (JSON,), json.dumps(greedy).encode())
            said = connection.exchange(written(asked), 1).answers[0]
        found.append((path, said.status, re.sub(_NOT_SAME, "", said.body.decode())))
    return found


def strike(report: Report, running: Running, port: int, num_threads: int = 8, at_once: int = 200) -> dict[str, Any]:
    """Damaged requests while there is time; what was wrong goes to the report, with the number that makes it again."""
    before, statuses, slowest, memory, number = valid_answers(port), Counter[str](), 0.0, list[int](), 0

    def one(number: int) -> tuple[int, Sent, Exchange, str | None]:
        what = sent(random.Random(f"{report.seed}-{number}"))
        try:
            return number, what, *try_one(port, what)
        except OSError as error:
            return number, what, Exchange(), f"no connection: {error!r}"

    with ThreadPoolExecutor(num_threads) as threads:
        while (not memory or not report.is_over) and running.is_alive:
            for which, what, came, wrong in threads.map(one, range(number, number + at_once)):
                statuses.update([str(said.status) for said in came.answers] or ["closed without an answer"])
                slowest = max(slowest, came.seconds)
                if wrong is not None:
                    report.wrong(f"request {which}: {wrong} | {what.what:.300} | {what.raw[:120]!r}")
            memory.append(running.process.memory_info().rss if running.is_alive else 0)
            number += at_once
    report.expect_none(f"in the log: {line:.300}" for line in running.err.splitlines() if _WRONG_IN_LOG.search(line))
    if running.is_alive:
        report.expect_none(_afterwards(port, before, [*memory, running.process.memory_info().rss]))
    else:
        report.wrong("the server has ended")
    return {"requests": number, "statuses": statuses, "slowest_seconds": slowest}


def _afterwards(port: int, before: list[Any], memory: list[int]) -> list[str]:
    found = [
        f"answered {a!r:.400}, before {b!r:.400}" for b, a in zip(before, valid_answers(port), strict=True) if a != b
    ]
    half = memory[len(memory) // 2]  # until then, bodies of 10 MB at a time have taken what they need
    if memory[-1] - half > _MOST_GROWTH:
        found.append(f"memory grew from {half >> 20} to {memory[-1] >> 20} MiB")
    with Connection(port) as connection:
        health = connection.exchange(_HEALTH, 1).answers[0].json
    return found + ([f"afterwards: {health}"] if health["running"] or health["status"] != "ok" else [])
