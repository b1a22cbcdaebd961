"""The queue of a loop's events, and how the loop waits for them.

A processor that sleeps while another stage computes resumes slowly: after 100 ms of halt, a virtual machine's computed
the same layers up to a fifth slower than one that never slept (``scripts/README.md``). So a loop that is pinned to a
processor of its own, and computes on it, does not sleep while an event is expected: it polls, and yields to the other
threads of that processor. A stage on a GPU gains nothing by polling, and one that shares its processors would take them
from those that compute; both sleep. Where there is a rehearsal (``engine.rehearsal``), they wake up for it before the
event is due.
"""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from splitinfer.engine.cpu_affinity import has_own_processor, yield_processor
from splitinfer.engine.rehearsal import When

AWAKE = 0.5  # seconds without an event after which none is expected soon
T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of events for one reading thread. Any thread may put."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._when = When()
        self.rehearse: Callable[[], None] | None = None
        """What is done shortly before an event is due."""

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
        return self._queue.get(timeout=timeout) if self.rehearse is None else self._rehearsed(timeout, self.rehearse)

    def _rehearsed(self, timeout: float | None, rehearse: Callable[[], None]) -> T:
        """The next event; a rehearsal shortly before it is due."""
        began, after = time.monotonic(), self._when.after
        try:
            if after is not None and (timeout is None or after < timeout):
                with suppress(queue.Empty):
                    return self._queue.get(timeout=after)
                rehearse()
                timeout = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            return self._queue.get(timeout=timeout)
        finally:
            self._when.waited(time.monotonic() - began)
