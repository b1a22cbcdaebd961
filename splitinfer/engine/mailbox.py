"""The inbox of a loop, the coordinator's or a worker's: other threads put events in, the loop reads them.

A processor that sleeps while another stage computes resumes slowly: after 100 ms of halt, a virtual machine's computed
the same layers up to a fifth slower than one that never slept (``scripts/README.md``). So a loop that is pinned to a
processor of its own, and computes on it, polls while an event is expected, and yields to that processor's other
threads. All others sleep.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.threads import has_own_processor, yield_processor

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
