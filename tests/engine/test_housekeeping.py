"""Freed memory goes back to the system in a pause, once, and not between the steps of a request."""

import queue

import pytest

from splitinfer.engine import housekeeping
from splitinfer.engine.housekeeping import Housekeeping

LONG = 60.0


def test_memory_is_freed_once_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    freed, inbox = list[None](), queue.SimpleQueue[str]()
    monkeypatch.setattr(housekeeping, "free_memory", lambda: freed.append(None))
    monkeypatch.setattr(housekeeping, "_PAUSE", 0.05)
    keeper = Housekeeping(inbox)
    for events in (1, 2):
        inbox.put("step")
        assert keeper.next_event(LONG) == "step"
        assert len(freed) == events - 1
        assert keeper.next_event(None) is None, "the pause, although nothing else limits the wait"
        assert keeper.next_event(0.1) is None
        assert len(freed) == events
    keeper.close()


def test_no_memory_is_freed_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    freed, inbox = list[None](), queue.SimpleQueue[str]()
    monkeypatch.setattr(housekeeping, "free_memory", lambda: freed.append(None))
    monkeypatch.setattr(housekeeping, "_PAUSE", LONG)
    keeper = Housekeeping(inbox)
    for _ in range(3):
        assert keeper.next_event(0.01) is None
        inbox.put("step")
        assert keeper.next_event(LONG) == "step"
    assert not freed
    keeper.close()
