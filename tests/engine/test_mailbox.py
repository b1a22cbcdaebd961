"""How a loop waits: asleep, or awake where the processor is its own."""

import os
import queue
import threading

import pytest

from splitinfer.engine import mailbox
from splitinfer.engine.mailbox import Mailbox


@pytest.fixture(params=[False, True], ids=["shared processor", "own processor"])
def is_awake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(mailbox, "has_own_processor", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_an_event_is_waited_for(timeout: float | None, is_awake: bool) -> None:
    box = Mailbox[str]()
    timer = threading.Timer(0.05, box.put, ["here"])
    timer.start()
    assert box.get(timeout, expecting=is_awake) == "here"


@pytest.mark.usefixtures("is_awake")
def test_what_is_there_comes_in_order_and_then_the_time_runs_out() -> None:
    box = Mailbox[int]()
    for n in range(3):
        box.put(n)
    assert [box.get(timeout, expecting=True) for timeout in (None, 0.0, 1.0)] == [0, 1, 2]
    for timeout in (0.0, -1.0, 0.05):
        with pytest.raises(queue.Empty):
            box.get(timeout, expecting=True)


@pytest.mark.parametrize("is_expected", [False, True])
def test_whose_processor_is_its_own_looks_again_for_what_it_expects(
    is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is pinned to one processor of several. It gives way between two looks."""
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("these tests run on one processor")
    box, heard = Mailbox[str](), list[str]()
    monkeypatch.setattr(mailbox, "yield_processor", lambda: box.put("seen awake"))
    later = threading.Timer(1.0, box.put, ["slept"])
    later.start()

    def pinned() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        heard.append(box.get(30.0, expecting=is_expected))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    later.cancel()
    assert heard == ["seen awake" if is_expected else "slept"]
