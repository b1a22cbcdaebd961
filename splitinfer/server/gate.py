"""Decides from method, path and headers who may send a request, before its body is read. Pure.

- **A program with a key** shows it: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.
- **This server's own page** has a session that a key has bought, in a cookie that scripts cannot read (HttpOnly) and
  other sites' requests do not carry (SameSite=Strict).
- **A page of another site**, in the browser of somebody who can reach this server, gets nothing. By DNS rebinding it
  can even make its own name point here. So the `Host` must be one of this server's names, an `Origin` its own or
  allowed by name, and its origin according to the browser (W3C's Fetch Metadata) not another site. A body must be
  declared as JSON, which no form can do; only a program other than a browser may leave that out.

On loopback only this machine's programs reach a server, so no key is needed unless some are given. Beyond loopback, a
server without keys serves everybody on the network, which needs the option `--no-auth`. The same holds for a server
without keys that every page of the web may use, because a browser on this machine reaches it wherever it listens.
"""

import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie

from splitinfer.common.endpoint import is_loopback
from splitinfer.errors import ConfigError
from splitinfer.server.keys import NOBODY, ApiKey, ApiKeys, Scope, digest
from splitinfer.server.problem import Problem

SESSION_COOKIE = "splitinfer_session"
EVERYWHERE = ("0.0.0.0", "::")
"""Hosts that make a server listen on all networks."""

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_WITH_BODY = ("POST", "PUT", "PATCH")
_HOST = re.compile(r"(\[[0-9A-Za-z:.%_-]+\]|[^][:@/\\\s]+)(:[0-9]*)?")  # a name or an address, and a port
_BROWSERS = ("Mozilla/", "Opera/")  # the user agents of all browsers begin so
_CURLS_OWN = "application/x-www-form-urlencoded"
_FOREIGN_SITES = ("cross-site", "same-site")  # same-site: another server on this machine, among others


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a request that are known before its body is read. ``headers``: names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """The access rules of a server.

    hosts: names under which it may be addressed; local names always work.
    origins: other sites whose pages may use it (CORS); ``*`` is all.
    keys: the admitted keys; ``None``: no key is needed.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    keys: ApiKeys | None = None

    def check_site(self, facts: Facts) -> None:
        """Refuse a request that a page of another site could have caused.

        Raises:
            Problem: 403 or 415.
        """
        host = facts.headers.get("host")
        if host is None:  # HTTP/1.0, which no browser speaks: a load balancer that checks /health
            host = "localhost"
        if name_of(host) not in (*_LOCAL_NAMES, *self.hosts) or _HOST.fullmatch(host) is None:
            raise Problem(403, f"host {host!r:.60} is not allowed; to allow it: --allow-host NAME")
        origin = facts.headers.get("origin")
        is_own = origin in (f"http://{host}", f"https://{host}")
        if origin is not None and not is_own and not self.allows(origin):
            raise Problem(403, f"requests from web pages at {origin!r:.60} are blocked; to allow them: --cors ORIGIN")
        if origin is None and facts.headers.get("sec-fetch-site") in _FOREIGN_SITES and not _is_link(facts):
            raise Problem(403, "requests from web pages of other sites are blocked; to allow them: --cors ORIGIN")
        if facts.method in _WITH_BODY and not _is_json(facts.headers):
            raise Problem(415, "the body must be JSON, declared as Content-Type: application/json")

    def allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    def caller(self, facts: Facts, sessions: "Sessions | None", scope: Scope = Scope.USE) -> ApiKey:
        """Return the key of the request's sender.

        Raises:
            Problem: 401 without a known key, 403 without the scope.
        """
        if self.keys is None:
            return NOBODY
        key = self._key_of(facts, sessions)
        if key is None:
            raise Problem(
                401, "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
            )
        if not key.may(scope):
            raise Problem(403, f"key {key.name!r} lacks the scope {scope}")
        return key

    def name_of_caller(self, facts: Facts, sessions: "Sessions | None") -> str:
        """Return the name of the sender's key for the log, or "-"."""
        key = NOBODY if self.keys is None else self._key_of(facts, sessions)
        return "-" if key is None or key is NOBODY else key.name

    def _key_of(self, facts: Facts, sessions: "Sessions | None") -> ApiKey | None:
        assert self.keys is not None
        shown = shown_key(facts.headers)
        if shown is not None:
            return self.keys.find(shown)  # a valid cookie does not excuse a wrong key
        bought_by = None if sessions is None else sessions.key_of(facts.cookies.get(SESSION_COOKIE, ""))
        return bought_by if bought_by is not None and self.keys.holds(bought_by) else None


def shown_key(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key") or None


def name_of(host: str) -> str:
    """Return the name in a ``Host`` header, without its port.

    >>> name_of("mini.local:8080"), name_of("[::1]:80"), name_of("LOCALHOST")
    ('mini.local', '::1', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_link(facts: Facts) -> bool:
    """Return whether a person follows a link to this server: only they see the response, and no page can read it."""
    how = facts.headers.get("sec-fetch-mode"), facts.headers.get("sec-fetch-dest")
    return facts.method == "GET" and how == ("navigate", "document")


def _is_json(headers: Mapping[str, str]) -> bool:
    """Return whether a body may be read as JSON: it is declared as JSON, or undeclared and not from a browser, or from
    `curl -d`, which declares a form. A browser sends forms and untyped bodies for any site, but it identifies itself in
    ways that no page can change, and shows no key to another site without asking it first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or any(name == "origin" or name.startswith("sec-") for name in headers):
        return kind == "application/json"
    agent = headers.get("user-agent", "")
    is_program = shown_key(headers) is not None or (agent != "" and not agent.startswith(_BROWSERS))
    return (kind == "" and is_program) or (kind == _CURLS_OWN and agent.startswith("curl/"))


# -- to whom it is opened --------------------------------------------------------------------------


def check_exposure(host: str, *, has_keys: bool, no_auth: bool, origins: Iterable[str] = ()) -> None:
    """Check that a server is no more open than its options say.

    Raises:
        ConfigError: it is more open, or the options contradict each other.
    """
    if no_auth and has_keys:
        raise ConfigError("keys are given, and --no-auth says that none is needed; leave one of them out")
    if has_keys or no_auth:
        return
    if not is_loopback(host):
        raise ConfigError(
            f"anyone who can reach {host} could use this server: add a key (`splitinfer keys add NAME --file FILE`, "
            "then --api-keys FILE), or give --no-auth"
        )
    if "*" in origins:
        raise ConfigError("--cors '*' lets every page of the web use a server without keys: name pages, or give keys")


def names_of(host: str, own_names: Iterable[str], allowed: Iterable[str]) -> frozenset[str]:
    """Return the names under which a server that listens on ``host`` may be addressed.

    own_names: the machine's, its addresses included; they count if the server listens everywhere.
    allowed: others.

    >>> sorted(names_of("0.0.0.0", ["Mini.local", "192.168.0.2"], ["ai.example:443"]))
    ['192.168.0.2', 'ai.example', 'mini.local']
    >>> sorted(names_of("192.168.0.2", ["mini.local"], []))
    ['192.168.0.2']
    """
    reached = own_names if host in EVERYWHERE else [host]
    return frozenset([*(name.lower().rstrip(".") for name in reached), *map(name_of, allowed)])


# -- sessions: what a page has in place of a key ---------------------------------------------------


SESSION_SECONDS = 24 * 3600
MAX_SESSIONS = 256
MAX_OF_KEY = 64


class Sessions:
    """The sessions under way and the keys that bought them; expired ones do not count. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MAX_SESSIONS) -> None:
        self._clock, self._most = clock, most
        self._held: OrderedDict[str, tuple[ApiKey, float]] = OrderedDict()  # by the name's digest; the oldest first

    def begin(self, key: ApiKey) -> str:
        """Return a new session's name."""
        own = [name for name, (by, _) in self._held.items() if by.name == key.name]
        for oldest in own[: max(0, len(own) - MAX_OF_KEY + 1)]:
            del self._held[oldest]
        while len(self._held) >= self._most:
            self._held.popitem(last=False)
        name = secrets.token_urlsafe(32)
        self._held[digest(name)] = (key, self._clock() + SESSION_SECONDS)
        return name

    def end(self, name: str) -> bool:
        """End a session. Return whether it existed."""
        return self._held.pop(digest(name), None) is not None

    def key_of(self, name: str) -> ApiKey | None:
        """Return the key that bought a session. Return None if the session does not exist or has expired."""
        key, until = self._held.get(digest(name), (None, 0.0))
        if key is not None and self._clock() >= until:
            del self._held[digest(name)]
            return None
        return key


def cookie(name: str, *, is_secure: bool, seconds: int = SESSION_SECONDS) -> str:
    """Return the ``Set-Cookie`` header of a session: no script reads it (HttpOnly), and no request that another site
    causes carries it (SameSite=Strict). ``is_secure``: sent over TLS only. ``seconds``: 0 removes it.

    >>> cookie("abc", is_secure=True, seconds=60)
    'splitinfer_session=abc; HttpOnly; Max-Age=60; Path=/; SameSite=Strict; Secure'
    """
    jar = SimpleCookie({SESSION_COOKIE: name})
    morsel = jar[SESSION_COOKIE]
    attributes = {"httponly": True, "max-age": seconds, "path": "/", "samesite": "Strict", "secure": is_secure}
    for attribute, value in attributes.items():
        morsel[attribute] = value
    return morsel.OutputString()
