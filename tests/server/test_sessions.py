"""Sessions: bought by a key, named by a cookie, bounded in time and number."""

import pytest

from splitinfer.server.gate import SESSION_COOKIE, Facts, Gate
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.problem import Problem
from splitinfer.server.sessions import MAX_OF_KEY, SESSION_SECONDS, Sessions, cookie

KEY = ApiKey("laptop", digest("secret"))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_session_ends_by_time_or_when_told():
    clock = Clock()
    sessions = Sessions(clock)
    first, second = sessions.begin(KEY), sessions.begin(KEY)
    assert first != second
    assert sessions.key_of(first) is KEY
    assert (sessions.end(second), sessions.end(second), sessions.key_of(second)) == (True, False, None)
    clock.now += SESSION_SECONDS - 1
    assert sessions.key_of(first) is KEY
    clock.now += 1
    assert sessions.key_of(first) is None
    assert not sessions._held, "what has expired is gone"


def test_the_oldest_makes_room():
    sessions = Sessions(most=2)
    names = [sessions.begin(KEY) for _ in range(3)]
    assert [sessions.key_of(name) for name in names] == [None, KEY, KEY]


def test_a_key_makes_room_among_its_own():
    sessions, other = Sessions(most=100), ApiKey("phone", digest("other"))
    theirs, names = sessions.begin(other), [sessions.begin(KEY) for _ in range(300)]
    assert sessions.key_of(theirs) is other
    assert [name for name in names if sessions.key_of(name) is not None] == names[-MAX_OF_KEY:]


def test_what_is_held_is_no_name():
    sessions = Sessions()
    name = sessions.begin(KEY)
    assert name not in str(sessions._held)
    assert sessions.key_of(digest(name)) is None


def test_a_cookie_is_out_of_reach_of_scripts_and_of_other_sites():
    parts = set(cookie("n", is_secure=False).split("; "))
    assert parts == {"splitinfer_session=n", "HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={SESSION_SECONDS}"}
    assert set(cookie("n", is_secure=True).split("; ")) - parts == {"Secure"}
    assert "Max-Age=0" in cookie("", is_secure=False, seconds=0)


def test_a_session_ends_with_its_key():
    sessions = Sessions()
    facts = Facts("GET", "/v1/models", {"host": "localhost"}, {SESSION_COOKIE: sessions.begin(KEY)})
    assert Gate(keys=ApiKeys([KEY])).caller(facts, sessions) is KEY
    for keys in ([], [ApiKey("laptop", digest("another"))], [ApiKey("laptop", digest("secret"), concurrent=1)]):
        with pytest.raises(Problem, match="an API key is needed"):
            Gate(keys=ApiKeys(keys)).caller(facts, sessions)
