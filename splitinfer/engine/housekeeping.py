"""A loop's queue of events, and what both loops do besides acting on them, the coordinator's and the workers': the
machine stays awake, its other processes know what this one holds, what computes preempts nothing on a pinned stage,
likely steps are built ahead, and an idle device is kept awake.

A processor that sleeps while another stage computes resumes slowly: after 100 ms of halt, a virtual machine's computed
the same layers up to a fifth slower than one that never slept (``scripts/README.md``). So a loop that is pinned to a
processor of its own, and computes on it, does not sleep while an event is expected: it polls, and yields to the other
threads of that processor. A stage on a GPU gains nothing by polling, and one that shares its processors would take them
from those that compute; both sleep.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.threads import ComputingThread, has_own_processor, yield_processor
from splitinfer.models.memory import HeldReport
from splitinfer.system.keep_awake import KeepAwake

AWAKE = 0.5  # seconds without an event after which none is expected soon
T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of events for one reading thread. Any thread may put."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, event: T) -> None:
        """Add an event; never waits."""
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty at the moment."""
        return self._queue.empty()

    def get(self, timeout: float | None, *, expecting: bool = False) -> T:
        """Return the next event, waiting at most ``timeout`` seconds; ``None`` waits without a limit.

        ``expecting``: an event is likely soon, so poll for it where that helps.

        Raises:
            queue.Empty: no event came in time.
        """
        if expecting and (timeout is None or timeout > 0) and has_own_processor():
            awake = AWAKE if timeout is None else min(AWAKE, timeout)
            until = time.monotonic() + awake
            while self._queue.empty() and time.monotonic() < until:
                yield_processor()
            timeout = None if timeout is None else timeout - awake
        if timeout is not None and timeout <= 0:
            return self._queue.get_nowait()
        return self._queue.get(timeout=timeout)


class Housekeeping(Generic[T]):
    """Of the loop that reads ``inbox``."""

    def __init__(self, inbox: Mailbox[T]) -> None:
        self._inbox, self._awake, self._held = inbox, KeepAwake(), HeldReport()
        self._computing: ComputingThread | None = None  # of the loop's thread

    def watch_machine(self, *, is_needed: bool) -> None:
        """Keep the machine awake while it ``is_needed``, and report what is held. Call it on the loop's thread, before
        that uses MLX."""
        now = time.monotonic()
        self._awake.update(is_needed, now)
        self._held.update(now)
        self._computing = self._computing or ComputingThread()
        self._computing.update(now)

    def until_release(self) -> float | None:
        """Seconds until the machine may sleep."""
        return self._awake.until_update(time.monotonic())

    def build_ahead(self, runner: StageRunner | None) -> None:
        """Build graphs of steps that are likely to come, until an event comes."""
        while runner is not None and self._inbox.is_empty and runner.prepare_next():
            pass

    def next_event(self, runner: StageRunner | None, within: float | None, *, expecting: bool) -> T | None:
        """Wait for the next event. ``None`` if none came ``within`` so many seconds, or until the device had to be kept
        awake. ``expecting``: one is likely soon."""
        tick = None if runner is None else runner.until_tick(time.monotonic())
        due = [seconds for seconds in (within, tick) if seconds is not None]
        try:
            return self._inbox.get(min(due, default=None), expecting=expecting)
        except queue.Empty:
            if runner is not None:
                runner.tick(time.monotonic())
            return None

    def close(self) -> None:
        """Let the machine sleep."""
        self._awake.close()
