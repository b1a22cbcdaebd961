"""What all routes share: requests under way, by their ids and keys."""

from dataclasses import replace
from typing import cast

import pytest

from splitinfer.llm import LLM
from splitinfer.server.keys import NOBODY, ApiKey, digest
from splitinfer.server.problem import Problem
from splitinfer.server.reading import Answer
from splitinfer.server.service import Service

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

    fingerprint = "0"

    def seconds_until_room(self, nth: int) -> float:
        return 3.0 * nth


def service() -> Service:
    return Service(cast(LLM, Foretelling()), "model", max_running=2)


def as_answer(aborts: Aborts) -> Answer:
    return cast(Answer, aborts)


def test_the_end_of_a_request_does_not_end_another_with_its_id():
    """A client that tries again under one id is noticed to have gone after its second request has begun."""
    running, first, again = service(), Aborts(), Aborts()
    with running.cancellable("mine", NOBODY, as_answer(again)):
        with running.cancellable("mine", NOBODY, as_answer(first)):
            pass
        assert (first.count, again.count) == (1, 0)
        assert running.cancel("mine", NOBODY)
        assert (again.is_cancelled, first.is_cancelled) == (True, False)
    assert not running.cancel("mine", NOBODY)


def test_an_id_belongs_to_a_key():
    running, mine, theirs = service(), Aborts(), Aborts()
    with running.cancellable("one", LAPTOP, as_answer(mine)):
        with running.cancellable("one", PHONE, as_answer(theirs)):
            assert running.cancel("one", PHONE)
            assert (mine.count, theirs.is_cancelled) == (0, True)
        assert not running.cancel("one", PHONE)
        assert not running.cancel("other", LAPTOP)
        assert running.cancel("one", LAPTOP)


def test_all_answers_under_one_id_are_cancelled():
    running, answers = service(), [Aborts(), Aborts()]
    with (
        running.cancellable("one", LAPTOP, as_answer(answers[0])),
        running.cancellable("one", LAPTOP, as_answer(answers[1])),
    ):
        assert running.cancel("one", LAPTOP)
    assert all(each.is_cancelled for each in answers)


def test_each_that_is_turned_away_is_told_another_time():
    running = service()
    with running.admitted(NOBODY), running.admitted(NOBODY):
        assert [retry_after(running) for _ in range(3)] == ["3", "6", "9"]
    running.took_one()
    with running.admitted(NOBODY), running.admitted(NOBODY):
        assert retry_after(running) == "3"


def retry_after(running: Service) -> str:
    with pytest.raises(Problem) as refused, running.admitted(NOBODY):
        pass
    return refused.value.headers["Retry-After"]


def test_who_is_admitted_is_counted_however_it_ends():
    running = service()
    with running.admitted(NOBODY), running.admitted(NOBODY):
        with pytest.raises(Problem) as refused, running.admitted(NOBODY):
            pass
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert running.num_running == 0
    for _ in range(2):  # the second finds the key's one place free again
        with pytest.raises(ZeroDivisionError), running.admitted(replace(LAPTOP, concurrent=1)):
            raise ZeroDivisionError
    assert running.num_running == 0
    running.is_draining = True
    with pytest.raises(Problem) as drained, running.admitted(NOBODY):
        pass
    assert (drained.value.status, drained.value.headers["Retry-After"]) == (503, "10")
