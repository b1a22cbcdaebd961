"""How a loop waits: asleep, or awake where the processor is its own."""

import os
import queue
import threading
import time
from collections.abc import Callable

import pytest

from splitinfer.engine import cpu_affinity as processor
from splitinfer.engine import mailbox
from splitinfer.engine.mailbox import AWAKE, Mailbox


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the waiting thread gave way."""
    times: list[float] = []
    yield_processor = mailbox.yield_processor

    def noted() -> None:
        times.append(time.monotonic())
        yield_processor()

    monkeypatch.setattr(mailbox, "yield_processor", noted)
    return times


@pytest.fixture
def own_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "has_own_processor", lambda: True)


def put_later(box: Mailbox[str], event: str, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, box.put, [event])
    timer.start()
    return timer


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.mark.usefixtures("own_processor")
class TestWithAProcessorOfItsOwn:
    @pytest.mark.parametrize("timeout", [None, 5.0])
    def test_an_expected_event_is_waited_for_awake(
        self, looks: list[float], timeout: float | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The event comes at the eleventh look, however long ten take; a reader that sleeps hears something else."""
        box, look = Mailbox[str](), mailbox.yield_processor
        sleeper = put_later(box, "slept", 4.0)

        def bring() -> None:
            look()
            if len(looks) == 11:
                box.put("here")

        monkeypatch.setattr(mailbox, "yield_processor", bring)
        monkeypatch.setattr(mailbox, "AWAKE", 3.0)
        assert box.get(timeout, expecting=True) == "here"
        sleeper.cancel()

    def test_the_thread_that_brings_it_is_let_in_at_once(self, looks: list[float]) -> None:
        box, gone, late = Mailbox[str](), threading.Event(), []

        def bring() -> None:
            for _ in range(20):
                time.sleep(0.005)
                late.append(-time.monotonic())
                box.put("here")
                gone.wait()
                gone.clear()

        thread = threading.Thread(target=bring)
        thread.start()
        for n in range(20):
            box.get(None, expecting=True)
            late[n] += time.monotonic()
            gone.set()
        thread.join()
        assert sorted(late)[10] < 0.004  # a thread that keeps Python's lock keeps it for 5 ms
        assert looks

    def test_nobody_stays_awake_for_ever(self, looks: list[float]) -> None:
        box = Mailbox[str]()
        put_later(box, "late", AWAKE + 0.3)
        assert box.get(None, expecting=True) == "late"
        assert looks[-1] - looks[0] <= AWAKE + 0.05

    def test_unexpected_events_are_slept_for(self, looks: list[float]) -> None:
        box = Mailbox[str]()
        put_later(box, "here", 0.05)
        assert box.get(None) == "here"
        assert not looks

    @pytest.mark.parametrize("timeout", [0.0, -1.0, 0.05, AWAKE + 0.1])
    def test_the_time_runs_out(self, looks: list[float], timeout: float) -> None:
        began = time.monotonic()
        with pytest.raises(queue.Empty):
            Mailbox[str]().get(timeout, expecting=True)
        assert time.monotonic() - began >= timeout
        assert bool(looks) == (timeout > 0)

    def test_what_is_there_comes_in_order(self) -> None:
        box = Mailbox[int]()
        for n in range(3):
            box.put(n)
        assert [box.get(t, expecting=True) for t in (None, 0.0, 1.0)] == [0, 1, 2]


class TestWhoseProcessorItIs:
    def test_unpinned_threads_sleep(self, looks: list[float]) -> None:
        if len(os.sched_getaffinity(0)) == 1:
            pytest.skip("these tests run on one processor")
        box = Mailbox[str]()
        put_later(box, "here", 0.05)
        assert box.get(None, expecting=True) == "here"
        assert not looks

    def test_pinned_ones_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processor, "_processors", lambda: 2)
        monkeypatch.setattr(processor, "on_gpu", lambda: False)
        box, was_awake = Mailbox[str](), threading.Event()

        def pinned() -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            assert box.get(4.0, expecting=True) == "seen awake"
            was_awake.set()

        monkeypatch.setattr(mailbox, "yield_processor", lambda: box.put("seen awake"))  # where a thread looks again
        in_thread(pinned)
        assert was_awake.is_set()

    def test_a_stage_on_a_gpu_sleeps(self, looks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processor, "on_gpu", lambda: True)
        box = Mailbox[str]()

        def pinned() -> None:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            box.get(None, expecting=True)

        put_later(box, "here", 0.05)
        in_thread(pinned)
        assert not looks
