"""A pipeline keeps its machines awake, has its threads scheduled for requests that wait, and announces its memory."""

import os
import threading
from collections.abc import Callable

import pytest
from engine.door import SECONDS, Open, ask
from processes import until
from stages import layout
from tiny import Folder

from splitinfer import LLM
from splitinfer.errors import SplitinferError
from splitinfer.models import memory
from splitinfer.places import of_this_host
from splitinfer.system import keep_awake, qos
from splitinfer.system.ledger import Ledger, Others
from splitinfer.wire.messages import Progress


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A thread's name for each time that the system is asked to stay awake, until it may sleep."""
    found = list[str]()

    def prevent() -> Callable[[], None]:
        name = threading.current_thread().name
        found.append(name)
        return lambda: found.remove(name)

    monkeypatch.setattr(keep_awake, "prevent_idle_sleep", prevent)
    monkeypatch.setattr(keep_awake, "LINGER", 0.2)
    return found


def test_the_coordinator_is_awake_while_requests_are_open_and_a_worker_while_it_is_used(
    held: list[str], pipeline: Open
) -> None:
    def until_held(count: int, why: str) -> None:
        until(lambda: len(held) == count, why, SECONDS)

    with pipeline("llama", [2, 2], prefix_cache=False) as there:
        until_held(1, "only the worker is kept awake")
        (request,) = there.submit(ask(9, max_tokens=200))
        there.read(request, 1)
        assert len(held) == 2
        request.abort()
        until_held(1, "no request is open")
    until_held(0, "the worker's coordinator is gone")


def test_the_loops_of_both_sides_are_scheduled_for_requests(monkeypatch: pytest.MonkeyPatch, pipeline: Open) -> None:
    seen = set[int]()
    monkeypatch.setattr(qos, "serve_requests", lambda: seen.add(threading.get_ident()))
    with pipeline("llama", [2, 2]) as there:
        there.answers(ask())
    assert len(seen - {threading.get_ident()}) >= 2


def others(group: int = 1) -> Others:
    """What another process of the user is told."""
    return Ledger(of_this_host("memory"), group).others()


def test_what_is_announced_follows_a_stage_to_its_end(pipeline: Open) -> None:
    assert others() == Others()
    with pipeline("llama", [2, 2]) as there:
        growth = sum(int(stage["free_bytes_when_loaded"] * memory.KV_SHARE) for stage in there.stats["stages"])
        assert others().to_come == pytest.approx(growth, rel=0.01), "of both stages, in one process"
        assert others().held > 10**5
        there.llm.close()
        until(lambda: others().to_come == 0, "the worker only keeps its weights", SECONDS)
        assert others().held > 0
    assert others() == Others()


def test_a_stage_that_is_not_loaded_after_all_announces_nothing(tiny_folder: Folder) -> None:
    announced = list[int]()

    def fail(_name: str, progress: Progress) -> None:
        if progress.phase == "survey":
            announced.append(others().to_come)
            raise SplitinferError("enough")

    with pytest.raises(SplitinferError, match="enough"):
        LLM(layout(tiny_folder("llama"), [4], []), notice=fail)
    assert announced[0] > 0
    assert others() == Others()


@pytest.mark.nightly
def test_a_local_worker_belongs_to_its_coordinator(tiny_folder: Folder) -> None:
    with LLM(layout(tiny_folder("llama"), [2, 2], ["local"])):
        assert others(os.getpid()).to_come < others().to_come, "they share what they have"
    until(lambda: others() == Others(), "nothing is claimed any more", SECONDS)
