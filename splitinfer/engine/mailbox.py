"""Where a loop's events wait for it, and how the loop waits for them.

A processor that sleeps while another stage computes comes back slowly: after 100 ms of halt, a virtual machine's
computed the same layers up to a fifth slower than one that never slept (``scripts/README.md``). So a loop that
has a processor to itself, and computes on it, does not sleep while the next event is near: it looks, and lets
others of that processor go first. A stage on a GPU gains nothing by that, and one that shares its processors
would take them from those that compute; both sleep.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.cpu_affinity import has_own_processor, yield_processor

AWAKE = 0.5  # seconds without an event after which there is no reason to expect one soon
T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue of events for one reader. Any thread may put."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, event: T) -> None:
        """Add an event; never waits."""
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits at the moment."""
        return self._queue.empty()

    def get(self, timeout: float | None, *, expecting: bool = False) -> T:
        """The next event, waiting at most ``timeout`` seconds for it; ``None`` waits for ever.

        ``expecting``: one is likely soon, so stay awake for it, where that helps.

        Raises:
            queue.Empty: none came.
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
