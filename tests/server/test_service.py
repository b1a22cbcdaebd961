"""What all routes share: requests under way, by their ids and keys."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from splitinfer.server.keys import NOBODY, ApiKey, digest
from splitinfer.server.problem import Problem
from splitinfer.server.service import Service
from splitinfer.settings import Settings

LAPTOP, PHONE = ApiKey("laptop", digest("a")), ApiKey("phone", digest("b"))


class Aborts:
    """An answer that only knows how often it was ended."""

    def __init__(self) -> None:
        self.count = 0
        self.is_cancelled = False

    def abort(self) -> None:
        self.count += 1

    def cancel(self) -> None:
        self.is_cancelled = True
        self.abort()


class Foretelling:
    """A library whose queue has room for one request more every three seconds."""

    fingerprint, max_running, settings = "0", 4, Settings(max_waiting=2000)

    def seconds_until_room(self, nth: int) -> float:
        return 3.0 * nth


def service() -> Service:
    return Service(Foretelling(), "model", max_running=2)


def test_the_end_of_a_request_does_not_end_another_with_its_id():
    """A client that tries again under one id is noticed to have gone after its second request has begun."""
    running, first, again = service(), Aborts(), Aborts()
    with running.cancellable("mine", NOBODY, again):
        with running.cancellable("mine", NOBODY, first):
            pass
        assert (first.count, again.count) == (1, 0)
        assert running.cancel("mine", NOBODY)
        assert (again.is_cancelled, first.is_cancelled) == (True, False)
    assert not running.cancel("mine", NOBODY)


def test_an_id_belongs_to_a_key():
    running, mine, theirs = service(), Aborts(), Aborts()
    with running.cancellable("one", LAPTOP, mine):
        with running.cancellable("one", PHONE, theirs):
            assert running.cancel("one", PHONE)
            assert (mine.count, theirs.is_cancelled) == (0, True)
        assert not running.cancel("one", PHONE)
        assert not running.cancel("other", LAPTOP)
        with running.cancellable("one", LAPTOP, second := Aborts()):
            assert running.cancel("one", LAPTOP)
        assert (mine.is_cancelled, second.is_cancelled) == (True, True), "both under this id"


def test_the_engines_queue_is_full_before_the_server_is():
    """Else its own bound would never be met, and a larger ``Settings.max_waiting`` would mean nothing."""
    running = Service(Foretelling(), "model")
    with ExitStack() as under_way:
        for _ in range(2004 + 64):
            under_way.enter_context(running.admitted(NOBODY))
        assert retry_after(running) == "3"


def test_a_key_is_told_of_its_own_limits_first_and_a_full_queue_costs_it_nothing():
    running, slow = service(), ApiKey("slow", digest("c"), requests_per_minute=1)
    with running.admitted(NOBODY), running.admitted(NOBODY):
        assert [refusal(running, slow).code for _ in range(2)] == ["queue_full"] * 2
    with running.admitted(slow), running.admitted(NOBODY):
        assert refusal(running, slow).code == "rate_limit_exceeded"


def test_each_that_is_turned_away_is_told_another_time():
    running = service()
    with running.admitted(NOBODY), running.admitted(NOBODY):
        assert [retry_after(running) for _ in range(3)] == ["3", "6", "9"]
        later = [int(retry_after(running)) for _ in range(100)]  # one client that asks on and on
        assert max(later) == 16 * 3
        assert min(later) == 3
    running.took_one()
    with running.admitted(NOBODY), running.admitted(NOBODY):
        assert retry_after(running) == "3"


def refusal(running: Service, key: ApiKey) -> Problem:
    with pytest.raises(Problem) as refused, running.admitted(key):
        pass
    return refused.value


def retry_after(running: Service) -> str:
    return refusal(running, NOBODY).headers["Retry-After"]


def test_who_is_admitted_is_counted_however_it_ends():
    running = service()
    for _ in range(2):  # the second finds the key's one place free again
        with pytest.raises(ZeroDivisionError), running.admitted(replace(LAPTOP, concurrent=1)):
            raise ZeroDivisionError
    assert running.num_running == 0
    running.is_draining = True
    drained = refusal(running, NOBODY)
    assert (drained.status, drained.headers["Retry-After"]) == (503, "10")
