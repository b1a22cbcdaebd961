"""Sessions: what a page of this server has in place of a key, so that no script ever holds one.

A key buys a session, whose name is a random cookie. The server keeps its digest, for a day, and only in memory: it ends
with the process. There are at most ``MAX_SESSIONS``, and ``MAX_OF_KEY`` of one key; the oldest makes room, of the same
key first, so nobody can fill memory with them, or end those of others.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from http.cookies import SimpleCookie

from splitinfer.server.gate import SESSION_COOKIE
from splitinfer.server.keys import ApiKey, digest

SESSION_SECONDS = 24 * 3600
MAX_SESSIONS = 256
MAX_OF_KEY = 64


class Sessions:
    """The sessions under way and the keys that bought them; expired ones do not count. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MAX_SESSIONS) -> None:
        self._clock, self._most = clock, most
        self._held: OrderedDict[str, tuple[ApiKey, float]] = OrderedDict()  # by the name's digest; the oldest first

    def begin(self, key: ApiKey) -> str:
        """A new session's name."""
        own = [name for name, (by, _) in self._held.items() if by.name == key.name]
        for oldest in own[: max(0, len(own) - MAX_OF_KEY + 1)]:
            del self._held[oldest]
        while len(self._held) >= self._most:
            self._held.popitem(last=False)
        name = secrets.token_urlsafe(32)
        self._held[digest(name)] = (key, self._clock() + SESSION_SECONDS)
        return name

    def end(self, name: str) -> bool:
        """End a session; whether there was one."""
        return self._held.pop(digest(name), None) is not None

    def key_of(self, name: str) -> ApiKey | None:
        """The key that bought a session; ``None`` where there is no such session, or none any more."""
        key, until = self._held.get(digest(name), (None, 0.0))
        if key is not None and self._clock() >= until:
            del self._held[digest(name)]
            return None
        return key


def cookie(name: str, *, is_secure: bool, seconds: int = SESSION_SECONDS) -> str:
    """The ``Set-Cookie`` header of a session: no script reads it (HttpOnly), and no request that another site causes
    carries it (SameSite=Strict). ``is_secure``: sent over TLS only. ``seconds``: 0 removes it.

    >>> cookie("abc", is_secure=True, seconds=60)
    'splitinfer_session=abc; HttpOnly; Max-Age=60; Path=/; SameSite=Strict; Secure'
    """
    jar = SimpleCookie({SESSION_COOKIE: name})
    morsel = jar[SESSION_COOKIE]
    attributes = {"httponly": True, "max-age": seconds, "path": "/", "samesite": "Strict", "secure": is_secure}
    for attribute, value in attributes.items():
        morsel[attribute] = value
    return morsel.OutputString()
