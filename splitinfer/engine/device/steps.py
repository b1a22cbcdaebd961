"""The steps in flight on a device, which are completed in the order of their launches. If the device computes at
launch, a step is completed at once. Otherwise a thread waits for the steps, so that no result waits for a launch. After
a step that failed, no step is completed: its result would be taken for the missing one's."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from splitinfer.system import qos

T = TypeVar("T")
_Entry = tuple[deque[T], T, Callable[[T], object], Callable[[T], None]]  # the list, the step, wait, complete


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The error of a step in flight. ``is_late`` returns whether the step has been dropped since."""

    error: Exception
    is_late: Callable[[], bool]

    def raise_if_due(self) -> None:
        """Raise the error, unless the step has been dropped."""
        if not self.is_late():
            raise self.error


class StepsUnderWay(Generic[T]):
    """The steps in flight of one loop, and the thread that waits for them.

    failed: called on the waiting thread with the error of waiting for a step or completing it. When the loop handles
        it, ``StepFailed.is_late`` tells whether that step has been dropped since.
    """

    def __init__(self, failed: Callable[["StepFailed"], None]) -> None:
        self._failed = failed
        self._queue: queue.SimpleQueue[_Entry[T] | None] = queue.SimpleQueue()  # for the thread; ``None``: the end
        self._lock = threading.Lock()  # guards the list
        self._changed = threading.Condition(self._lock)
        self._steps: deque[T] = deque()  # the oldest first; ``drop`` replaces the list by an empty one
        self._broken: deque[T] | None = None  # the list in which a step failed: its later steps are not completed
        self._completing = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step is under way."""
        return not self._steps

    def under_way(self) -> list[T]:
        """Return the steps that are launched and not yet completed, the oldest first."""
        with self._lock:
            return list(self._steps)

    def add(self, step: T, wait: Callable[[T], object], complete: Callable[[T], None], *, is_done: bool) -> None:
        """Add a launched step.

        Args:
            wait: blocks until the device is done with it.
            complete: called afterwards; never called if the step was dropped or an earlier one failed.
            is_done: the device computed it at launch, so complete it now.

        Raises:
            Exception: as ``wait`` and ``complete``, if ``is_done``.
        """
        if is_done:
            wait(step)
            complete(step)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="waiter", daemon=True)
            self._thread.start()
        with self._lock:
            self._steps.append(step)
            self._queue.put((self._steps, step, wait, complete))

    def drain(self) -> None:
        """Block until no step is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_empty)

    def drop(self) -> None:
        """Forget all steps in flight. None of them will be completed after this call returns."""
        with self._changed:
            self._steps = deque()
            self._changed.notify_all()
        with self._completing:  # wait for a step that is being completed
            pass

    def close(self) -> None:
        """Forget all steps in flight, and let the thread end after the step that it waits for. Return at once. No step
        may be added afterwards."""
        with self._changed:
            self._steps = deque()
            self._changed.notify_all()
        self._queue.put(None)

    def _run(self) -> None:
        qos.serve_requests()
        while (entry := self._queue.get()) is not None:
            self._see_to(*entry)
            del entry  # it holds arrays

    def _see_to(self, among: deque[T], step: T, wait: Callable[[T], object], complete: Callable[[T], None]) -> None:
        """Wait for a step and complete it, unless it was dropped or an earlier one failed."""
        try:
            if among is not self._broken and not self._is_dropped(among):
                wait(step)
                with self._completing:
                    if not self._is_dropped(among):
                        complete(step)
        except Exception as error:  # noqa: BLE001 - goes to the loop, which handles each kind of error
            if not self._is_dropped(among):
                self._broken = among
                self._failed(StepFailed(error, partial(self._is_dropped, among)))
        with self._changed:
            among.popleft()
            self._changed.notify_all()

    def _is_dropped(self, steps: deque[T]) -> bool:
        return steps is not self._steps
