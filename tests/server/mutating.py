"""Requests as strangers send them: valid ones of every route, damaged at random. Pure; the same seed, the same bytes.

A request is damaged in one of four places, sometimes in several:

    values    at any place of the JSON another value: of another type, huge, no number, half a character, deep, long
    text      the JSON as bytes: cut off, doubled, other encodings, bytes flipped, compressed
    head      method, target and headers: tricks with paths, repeated and contradicting headers, upgrades
    wire      the bytes of HTTP: bad lengths and chunks, folded and bare lines, several requests at once,
    other protocols
"""

import copy
import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from valid_requests import BODIES, JSON, Asked, places

WITHOUT_BODY = (
    ("GET", "/v1/models"), ("GET", "/v1/models/demo"), ("GET", "/health"), ("DELETE", "/v1/requests/x"),
    ("DELETE", "/session"),
)  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """What goes over a socket. ``paths_are_anthropic``: of each request in it, as far as it can be told.
    ``num_answers``: if that many must come; ``None``: up to the server, which may also close."""

    raw: bytes
    paths_are_anthropic: tuple[bool, ...]
    num_answers: int | None
    what: str

    @property
    def is_head(self) -> bool:
        """Whether its answer has no body."""
        return self.raw.lstrip().startswith(b"HEAD ")


# -- values ----------------------------------------------------------------------------------------

_RAW = "@raw@"  # stands for bytes that no JSON writer makes


def _deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


SMALL: tuple[bytes, ...] = (
    b"null", b"true", b"false", b"0", b"-0", b"-1", b"1", b"1.5", b"1e-9", b"2147483648", b"9223372036854775808",
    b"18446744073709551616", b"-9223372036854775809", b"1e308", b"-1e308", b"1e400", b"-1e400", b"NaN", b"Infinity",
    b"-Infinity", b"1" + b"0" * 400, b"9" * 5000, b"0x10", b"1_000", b"01", b"+1", b".5", b'""', b'"x"', b'"0"', b'" "',
    b'"\\ud800"', b'"\\udc00x"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\x00"', b'"\\u202e\\ufeff"', b'"\xff\xfe"',
    b'"\xed\xa0\x80"', b'"<|im_start|>system"', b'"{{ 7*7 }}{% for x in range(9999999) %}"', b'"%s%n{0}"', b"[]",
    b"[[]]",
    b"{}", b'{"": null}', b'{"type": []}', b'{"type": {}}', b'{"type": "text"}', b'["x"]', b"[null]", b"[1, 2, 3]",
    b'[{"role": "user"}]', b'[{"type": "text", "text": 1}]', b'{"__proto__": 1, "__class__": 2}', b'"\\"', b"'x'",
    _deep(40), _deep(70), b'{"a": ' * 30 + b"1" + b"}" * 30,
)  # fmt: skip
"""Values that are quickly sent."""


def _large(rng: random.Random) -> bytes:
    """A value of up to 10 MB."""
    makers: tuple[Callable[[], bytes], ...] = (
        lambda: b'"' + b"a" * 10_000_000 + b'"',
        lambda: b'"' + b"ab cd " * rng.choice((1_000, 20_000, 200_000)) + b'"',
        lambda: b'"' + b" " * 300_000 + b'"',
        lambda: b"[" + b",".join([rng.choice((b"1", b'"a"', b"[]", b"{}"))] * rng.choice((2_000, 300_000))) + b"]",
        lambda: b"{" + b",".join(b'"%d":1' % i for i in range(rng.choice((2_000, 300_000)))) + b"}",
        lambda: _deep(100_000),
        lambda: b"[" + b",".join([b'{"role":"user","content":"x"}'] * rng.choice((500, 5_000, 50_000))) + b"]",
        lambda: b'"' + bytes(rng.randrange(0x20, 0x100) for _ in range(2000)) + b'"',
    )
    return rng.choice(makers)()


_NAMES = (
    "surprise", "", "__class__", "\u0000", "a" * 5000, "chat_template", "tokenize", "return_dict", "return_tensors",
    "padding", "max_length", "truncation", "tokenizer_kwargs", "conversation", "continue_final_message", "messages",
    "documents", "add_generation_prompt", "self", "return_assistant_tokens_mask", "sanitize_control_tokens", "tools",
    "raise_exception", "bos_token", "9" * 5000, "-1", "1e3", "\u0661", "type", "token_ids",
)  # fmt: skip


def _at(body: Any, path: Sequence[Any]) -> Any:
    for key in path:
        body = body[key]
    return body


def _with_value(rng: random.Random, body: dict[str, Any], raw: list[bytes]) -> str:
    """Put a strange value somewhere; where. ``raw`` gets its bytes."""
    path = rng.choice([*places(body)] or [("surprise",)])
    raw.append(rng.choice(SMALL) if rng.random() < 0.98 else _large(rng))
    _at(body, path[:-1])[path[-1]] = f"{_RAW}{len(raw) - 1}"
    return f"value {'.'.join(map(str, path))}={raw[-1][:24]!r}"


def _without(rng: random.Random, body: dict[str, Any], _raw: list[bytes]) -> str:
    path = rng.choice([*places(body)] or [()])
    if path:
        del _at(body, path[:-1])[path[-1]]
    return f"without {'.'.join(map(str, path))}"


def _with_name(rng: random.Random, body: dict[str, Any], raw: list[bytes]) -> str:
    objects = [path for path in ((), *places(body)) if isinstance(_at(body, path), dict)]
    path, name = rng.choice(objects), rng.choice(_NAMES)
    raw.append(rng.choice(SMALL))
    _at(body, path)[name] = f"{_RAW}{len(raw) - 1}"
    return f"name {'.'.join(map(str, path))}[{name[:20]!r}]={raw[-1][:24]!r}"


def _moved(rng: random.Random, body: dict[str, Any], _raw: list[bytes]) -> str:
    """A value of another field, or the whole in a list."""
    paths = [*places(body)]
    if not paths:
        return "nothing"
    to, source = rng.choice(paths), rng.choice(paths)
    value = copy.deepcopy(_at(body, source))
    _at(body, to[:-1])[to[-1]] = [value] if rng.random() < 0.3 else value
    return f"moved {'.'.join(map(str, source))} to {'.'.join(map(str, to))}"


_IN_VALUES = (_with_value, _with_value, _with_value, _without, _with_name, _moved)


def damaged_values(rng: random.Random, body: dict[str, Any]) -> tuple[bytes, str]:
    """The JSON of a body with one to three strange values."""
    made, raw, what = copy.deepcopy(body), list[bytes](), list[str]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what.append(rng.choice(_IN_VALUES)(rng, made, raw))
    text = json.dumps(made).encode()
    for i, value in enumerate(raw):
        text = text.replace(f'"{_RAW}{i}"'.encode(), value)
    return text, ", ".join(what)


# -- text ------------------------------------------------------------------------------------------


def damaged_text(rng: random.Random, body: bytes) -> tuple[bytes, str]:
    """The bytes of a body, damaged."""
    at = rng.randrange(len(body) + 1)
    flipped = bytearray(body or b"x")
    for _ in range(rng.choice((1, 2, 8))):
        flipped[rng.randrange(len(flipped))] = rng.randrange(256)
    kinds: dict[str, bytes] = {
        "empty": b"", "blank": b" \n", "cut off": body[:at], "begins late": body[at:], "twice": body + body,
        "two lines": body + b"\n" + body, "mark of order": b"\xef\xbb\xbf" + body, "flipped": bytes(flipped),
        "utf-16": body.decode("utf-8", "replace").encode("utf-16"), "gzip": gzip.compress(body, 1),
        "inserted": body[:at] + rng.choice((b"\x00", b"\xff", b"\xc3", b"}", b"//", b"\\", b"\r\n")) + body[at:],
        "a name twice": b'{"model": 1, ' + body[1:] if len(body) > 2 else body, "in a list": b"[" + body + b"]",
        "a comma more": body[:-1] + b",}", "form": b"model=m&messages=x", "word": rng.choice(SMALL),
    }  # fmt: skip
    kind = rng.choice([*kinds])
    return kinds[kind], f"text {kind}"


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
    (("Host", "[::1"),), (("Host", "localhost:"),), (("Host", "localhost:80:80"),),
    (("Host", "localhost@evil.example"),),
    (("Host", "evil.example"),), (("Host", ""),), (("Host", "localhost"), ("Host", "localhost")),
    (("Content-Type", "text/plain"),), (("Content-Type", "application/json"), ("Content-Type", "text/plain")),
    (("Content-Type", "application/json; charset=utf-16"),), (("Content-Type", ""),),
    (("Content-Type", "multipart/form-data"),),
    (("Origin", "null"),), (("Origin", "http://localhost"), ("Origin", "https://evil.example")), (("Origin", ""),),
    (("Cookie", "splitinfer_session=" + "a" * 4000),), (("Cookie", '="\\'),),
    (("Cookie", 'a="' + "\\" * 60_000 + '"'),),
    (("Cookie", ";;;=;==,\x01"),), (("Authorization", "Bearer"),), (("Authorization", "Bearer " + "k" * 20_000),),
    (("Authorization", "\x80\xff"),), (("X-Api-Key", "a"), ("X-Api-Key", "b")), (("X-Request-Id", "a b"),),
    (("X-Request-Id", "x" * 5000),), (("X-Request-Id", "mine"),), (("X-Splitinfer-Priority", "1e400"),),
    (("X-Splitinfer-Priority", "NaN"),), (("X-Splitinfer-Priority", "\u00b2"),), (("X-Splitinfer-Timeout", "-1"),),
    (("X-Splitinfer-Timeout", "0.001"),), (("X-Splitinfer-Timeout", "Infinity"),), (("X-Large", "a" * 60_000),),
    tuple((f"X-{i}", "a") for i in range(500)), (("Connection", "close"),), (("Connection", "keep-alive, x" * 50),),
    (("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "eA==")),
    (("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQCAAAAAAIAAAAA")),
    (("Expect", "100-continue"),), (("Expect", "a miracle"),), (("Content-Encoding", "gzip"),),
    (("Content-Encoding", "br"),),
    (("TE", "trailers"),), (("Accept", "text/html"),), (("Accept-Encoding", "gzip"),), (("Range", "bytes=0-1"),),
    (("If-Match", "*"),), (("X-Forwarded-For", "[::"),), (("X-Forwarded-Proto", "gopher"),),
    (("X-Forwarded-Host", "evil"),),
    (("X-Http-Method-Override", "DELETE"),), (("Access-Control-Request-Method", "POST"), ("Origin", "null")),
    (("Forwarded", 'for="_'),), (("X-Empty", ""),), (("X-A", "\x80\xfe"),), (("Sec-Fetch-Site", "cross-site"),),
)  # fmt: skip


def damaged_head(rng: random.Random, asked: Asked) -> Asked:
    """The request with another method, target or headers."""
    kind = rng.random()
    if kind < 0.2:
        method = rng.choice(_METHODS)
        return asked.and_then(f"method {method[:9]}", method=method)
    if kind < 0.45:
        at = rng.randrange(len(_TARGETS))
        return asked.and_then(f"target {at}", target=_TARGETS[at](asked.target))
    more = rng.choice(_HEADERS)
    kept = tuple(one for one in asked.headers if one[0] not in {name for name, _ in more})
    return asked.and_then(f"headers {more[0][0]}: {more[0][1][:24]!r}", headers=kept + more)


# -- requests --------------------------------------------------------------------------------------


def valid(rng: random.Random) -> Asked:
    """A request of any route."""
    if rng.random() < 0.1:
        method, path = rng.choice(WITHOUT_BODY)
        return Asked(method, path)
    path = rng.choice([*BODIES])
    body = dict(BODIES[path])
    if "stream" in body:
        body["stream"] = rng.random() < 0.5
    return Asked("POST", path, (JSON,), json.dumps(body).encode())


def mutated(rng: random.Random) -> Asked:
    """A damaged request, whole as HTTP."""
    asked = valid(rng)
    if asked.method == "POST" and rng.random() < 0.75:
        body, what = damaged_values(rng, json.loads(asked.body))
        asked = asked.and_then(what, body=body)
    if asked.method == "POST" and rng.random() < 0.2:
        body, what = damaged_text(rng, asked.body)
        asked = asked.and_then(what, body=body)
    if rng.random() < 0.25 or asked.what == "valid":
        asked = damaged_head(rng, asked)
    return asked


# -- wire ------------------------------------------------------------------------------------------


def written(asked: Asked, *framing: str, version: str = "HTTP/1.1", body: bytes | None = None) -> bytes:
    """The bytes of a request. ``framing``: the lines that say how long the body is; its true length if not given."""
    names = {name.lower() for name, _ in asked.headers}
    host = () if "host" in names else ("Host: localhost",)
    lines = [f"{asked.method} {asked.target} {version}", *host, *(f"{name}: {value}" for name, value in asked.headers)]
    length = framing or ((f"Content-Length: {len(asked.body)}",) if asked.body or asked.method == "POST" else ())
    head = "\r\n".join([*lines, *length, "", ""]).encode("latin-1")
    return head + (asked.body if body is None else body)


def chunked(body: bytes, sizes: Sequence[int]) -> bytes:
    """A body in chunks of these sizes in turn."""
    made, at, i = [], 0, 0
    while at < len(body):
        part = body[at : at + sizes[i % len(sizes)]]
        made.append(b"%x\r\n%b\r\n" % (len(part), part))
        at, i = at + len(part), i + 1
    return b"".join(made) + b"0\r\n\r\n"


_TE = "Transfer-Encoding: chunked"
_WHOLE = "whole"
_NO_REQUESTS = ("http2", "tls", "noise", "nothing")
_NO_NUMBERS = ("x", "", "1 1", "0x10", "1,1", "\xd9\xa1")


def _wire_kinds(rng: random.Random, asked: Asked) -> dict[str, Callable[[], bytes]]:
    """Damages of HTTP itself. Those whose name begins with ``whole`` are answered."""
    body, size = asked.body, len(asked.body)
    short = asked if size < 100_000 else replace(asked, body=b"{}")  # a byte at a time
    return {
        "whole chunked": lambda: written(short, _TE, body=chunked(short.body, (1, 7, 4096))),
        "whole 1.0": lambda: written(asked, version="HTTP/1.0"),
        "length short": lambda: written(asked, f"Content-Length: {size // 2}"),
        "length long": lambda: written(asked, f"Content-Length: {size + 9}"),
        "length negative": lambda: written(asked, "Content-Length: -1"),
        "length no number": lambda: written(asked, "Content-Length: " + rng.choice(_NO_NUMBERS)),
        "length huge": lambda: written(asked, "Content-Length: " + "9" * rng.choice((12, 18, 30, 5000))),
        "length twice": lambda: written(asked, f"Content-Length: {size}", f"Content-Length: {size + 1}"),
        "length and chunked": lambda: written(short, f"Content-Length: {size}", _TE, body=chunked(short.body, (9,))),
        "no length": lambda: written(asked, "X-None: 1"),
        "chunk size wrong": lambda: written(asked, _TE, body=b"5\r\n" + body + b"\r\n0\r\n\r\n"),
        "chunk size no number": lambda: written(asked, _TE, body=b"zz\r\n" + body + b"\r\n0\r\n\r\n"),
        "chunk size huge": lambda: written(asked, _TE, body=b"f" * rng.choice((7, 15, 40)) + b"\r\n" + body),
        "chunk extension long": lambda: written(asked, _TE, body=b"1;" + b"a" * 70_000 + b"\r\n{\r\n0\r\n\r\n"),
        "chunk trailers": lambda: written(asked, _TE, body=b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 20 + b"\r\n"),
        "chunks never end": lambda: written(asked, _TE, body=b"1\r\n{\r\n"),
        "encoding unknown": lambda: written(asked, "Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
        "encoding twice": lambda: written(asked, _TE, _TE, body=b"0\r\n\r\n"),
        "folded": lambda: written(asked, "X-Fold: a\r\n b", f"Content-Length: {size}"),
        "blank in name": lambda: written(asked, f"Content-Length : {size}"),
        "bare line ends": lambda: written(asked).replace(b"\r\n", b"\n", 9),
        "bare returns": lambda: written(asked).replace(b"\r\n", b"\r", 3),
        "nul in head": lambda: written(asked, "X-A: \x00", f"Content-Length: {size}"),
        "head cut off": lambda: written(asked)[: rng.randrange(1, 60)],
        "head huge": lambda: written(asked, "X-A: " + "a" * 80_000, f"Content-Length: {size}"),
        "head many": lambda: written(asked, *(f"X-{i}: a" for i in range(9000)), f"Content-Length: {size}"),
        "version": lambda: written(asked, version=rng.choice(("HTTP/2.0", "HTTP/0.9", "HTTP/9", "ICY", "",
        "HTTP/1.1 x"))),
        "no host": lambda: written(asked).replace(b"Host: localhost\r\n", b"", 1),
        "http2": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(rng.randrange(256) for _ in range(60)),
        "tls": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(rng.randrange(256) for _ in range(200)),
        "noise": lambda: bytes(rng.randrange(256) for _ in range(rng.choice((1, 30, 3000)))),
        "blank lines": lambda: b"\r\n" * rng.choice((1, 3, 500)) + written(asked),
        "nothing": lambda: b"",
    }  # fmt: skip


def sent(rng: random.Random) -> Sent:
    """What a stranger sends over one connection."""
    kind = rng.random()
    asked = mutated(rng)
    if kind < 0.6:
        return _as_it_is(asked)
    if kind < 0.75:  # several at once
        several = [mutated(rng) if rng.random() < 0.5 else valid(rng) for _ in range(rng.choice((2, 3, 8)))]
        several = [one for one in several if _is_plain(one)] or [valid(rng)]
        raw = b"".join(written(one) for one in several)
        what = "; ".join(one.what for one in several)
        return Sent(raw, tuple(one.is_anthropic for one in several), len(several), f"pipelined {what}")
    asked = asked if rng.random() < 0.3 else valid(rng)
    kinds = _wire_kinds(rng, asked)
    name = rng.choice([*kinds])
    is_whole = name.startswith(_WHOLE) and _is_plain(asked)
    is_anthropic = asked.is_anthropic and name not in _NO_REQUESTS
    return Sent(kinds[name](), (is_anthropic,), 1 if is_whole else None, f"wire {name}: {asked.what}")


def _as_it_is(asked: Asked) -> Sent:
    return Sent(written(asked), (asked.is_anthropic,), 1 if _is_plain(asked) else None, asked.what)


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
