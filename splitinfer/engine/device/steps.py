"""The steps under way on a device: each is completed when it is done, in their order.

On a device that computes at launch that is at once, on the launching thread. On any other a thread waits for the steps,
one after the other, and completes them, so that nothing on the way of a result waits for a launch.

Behind a step that failed none is completed: its result would be taken for the missing one's.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from splitinfer.system import qos

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepFailed:
    """What was raised for a step under way; ``is_late``: whether the step has been dropped since."""

    error: Exception
    is_late: Callable[[], bool]


class StepsUnderWay(Generic[T]):
    """Steps of one loop.

    wait: blocks until a step is done.
    complete: does what is to be done then; never called for a step that was dropped, or is behind one that failed.
    failed: called on the waiting thread with what ``wait`` or ``complete`` raised there. When the loop comes to it,
        ``StepFailed.is_late`` says whether that step has been dropped since.
    """

    def __init__(
        self, wait: Callable[[T], object], complete: Callable[[T], None], failed: Callable[["StepFailed"], None]
    ) -> None:
        self._wait, self._complete, self._failed = wait, complete, failed
        self._queue: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()  # ``None``: the end
        self._changed = threading.Condition()  # guards the two below
        self._num_under_way = self._generation = 0
        self._failed_generation = -1  # steps of this one are not completed any more
        self._completing = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step is under way."""
        return self._num_under_way == 0

    def add(self, step: T, *, is_done: bool) -> None:
        """Take a step that was launched. ``is_done``: the device computed it at launch, so complete it now.

        Raises:
            Exception: what completing raised, if ``is_done``.
        """
        if is_done:
            self._wait(step)
            self._complete(step)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waiter", daemon=True)
            self._thread.start()
        with self._changed:
            self._num_under_way += 1
            self._queue.put((self._generation, step))

    def drain(self) -> None:
        """Block until no step is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_under_way == 0)

    def drop(self) -> None:
        """Forget all steps under way. When this returns, none of them will be completed any more."""
        with self._changed:
            self._generation += 1
            self._num_under_way = 0
            self._changed.notify_all()
        with self._completing:  # one may be half-way
            pass

    def close(self) -> None:
        """Forget all steps under way, and end the thread as soon as it waits for none. None may be added any more."""
        self.drop()
        self._queue.put(None)

    def _run(self) -> None:
        qos.serve_requests()
        while (entry := self._queue.get()) is not None:
            generation, step = entry
            del entry
            error = None if generation == self._failed_generation else self._try(generation, step)
            del step  # it holds arrays
            if error is not None and not self._is_dropped(generation):
                self._failed_generation = generation
                self._failed(StepFailed(error, partial(self._is_dropped, generation)))
            with self._changed:
                if generation == self._generation:
                    self._num_under_way -= 1
                    self._changed.notify_all()

    def _try(self, generation: int, step: T) -> Exception | None:
        """Complete a step when it is done, unless it was dropped; what that raised."""
        if self._is_dropped(generation):
            return None
        try:
            self._wait(step)
            with self._completing:
                if not self._is_dropped(generation):
                    self._complete(step)
        except Exception as error:  # noqa: BLE001 - goes to the loop, which knows what to do about each kind
            return error
        return None

    def _is_dropped(self, generation: int) -> bool:
        return generation != self._generation
