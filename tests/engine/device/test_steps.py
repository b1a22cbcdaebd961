"""The steps under way on a device: completed in order, each when it is done, and never once they are dropped."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from splitinfer.engine.device.steps import StepFailed, StepsUnderWay

SOON = 5.0  # seconds that nothing here takes


class Device:
    """Steps are numbers. Each is done when that is said; -1 stands for one that fails."""

    def __init__(self) -> None:
        self._done = {number: threading.Event() for number in range(-1, 10)}
        self.waited: queue.SimpleQueue[int] = queue.SimpleQueue()

    def wait(self, step: int) -> None:
        self.waited.put(step)
        assert self._done[step].wait(SOON)
        if step < 0:
            raise RuntimeError("the device broke")

    def done(self, *steps: int) -> None:
        for step in steps:
            self._done[step].set()


class Loop:
    """What the loop hears: the steps completed, and what failed."""

    def __init__(self) -> None:
        self.device = Device()
        self.completed: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[StepFailed] = queue.SimpleQueue()
        self.steps = StepsUnderWay[int](self.failed.put)

    def complete(self, step: int) -> None:
        self.completed.put(step)

    def add(self, *steps: int) -> None:
        for step in steps:
            self.steps.add(step, self.device.wait, self.complete, is_done=False)


@contextmanager
def running(loop: Loop) -> Iterator[Loop]:
    """At the end every step is let go, so that no thread waits for ever, and the thread ends."""
    try:
        yield loop
    finally:
        loop.device.done(*range(-1, 10))
        loop.steps.close()


def test_steps_are_completed_in_order_each_when_it_is_done() -> None:
    with running(Loop()) as loop:
        loop.add(0, 1, 2)
        assert loop.device.waited.get(timeout=SOON) == 0
        loop.device.done(1, 2)
        assert loop.completed.empty(), "one that is done earlier waits for those before it"
        assert not loop.steps.is_empty
        loop.device.done(0)
        assert [loop.completed.get(timeout=SOON) for _ in range(3)] == [0, 1, 2]
        loop.steps.drain()
        assert loop.steps.is_empty


def test_a_step_that_was_computed_at_launch_is_completed_by_its_launcher() -> None:
    with running(Loop()) as loop:
        loop.device.done(0)
        loop.steps.add(0, loop.device.wait, loop.complete, is_done=True)
        assert loop.completed.get_nowait() == 0
        loop.device.done(-1)
        with pytest.raises(RuntimeError):
            loop.steps.add(-1, loop.device.wait, loop.complete, is_done=True)
        assert loop.failed.empty(), "the launcher hears of it"
        assert loop.steps.is_empty


def test_what_is_dropped_is_never_completed_and_what_comes_after_is() -> None:
    with running(Loop()) as loop:
        loop.add(0, 1)
        assert loop.device.waited.get(timeout=SOON) == 0
        loop.steps.drop()
        assert loop.steps.is_empty
        loop.steps.drain()  # does not wait for them
        loop.add(2)
        loop.device.done(0, 1, 2)
        assert loop.completed.get(timeout=SOON) == 2
        loop.steps.drain()
        assert loop.completed.empty()
        assert loop.device.waited.get(timeout=SOON) == 2, "nobody waits for one that was dropped"


def test_dropping_waits_for_one_that_is_half_way_and_no_longer() -> None:
    half_way, go_on, ended = threading.Event(), threading.Event(), list[str]()

    def complete(_step: int) -> None:
        half_way.set()
        assert go_on.wait(SOON)
        ended.append("completed")

    steps = StepsUnderWay[int](lambda _why: None)
    steps.add(0, lambda _step: None, complete, is_done=False)
    assert half_way.wait(SOON)
    dropping = threading.Thread(target=lambda: (steps.drop(), ended.append("dropped")))
    dropping.start()
    dropping.join(0.02)
    assert dropping.is_alive(), "the loop forgets nothing that a step may still be read from"
    go_on.set()
    dropping.join(SOON)
    assert ended == ["completed", "dropped"]
    steps.close()


def test_a_failure_is_heard_once_and_nothing_behind_it_is_completed() -> None:
    """The result behind it would be taken for the missing one's."""
    with running(Loop()) as loop:
        loop.device.done(*range(-1, 5))
        loop.add(0, -1, 1, 2)
        why = loop.failed.get(timeout=SOON)
        assert isinstance(why.error, RuntimeError)
        assert not why.is_late()
        loop.steps.drain()
        loop.add(3)
        loop.steps.drain()
        assert loop.completed.get(timeout=SOON) == 0
        assert loop.completed.empty()
        assert loop.failed.empty()
        loop.steps.drop()
        assert why.is_late(), "the loop has been told of something else since, and has dropped the step"
        loop.add(4)
        assert loop.completed.get(timeout=SOON) == 4
