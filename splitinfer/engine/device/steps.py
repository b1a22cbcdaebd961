"""The steps under way on a device: each is completed when it is done, in their order. On a device that computes at
launch that is at once; on any other a thread waits for the steps, so that nothing on the way of a result waits for a
launch. Behind a step that failed none is completed: its result would be taken for the missing one's."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from splitinfer.system import qos

T = TypeVar("T")
_Entry = tuple[deque[T], T, Callable[[T], object], Callable[[T], None]]  # the list, the step, how to wait, and complete


@dataclass(frozen=True, slots=True)
class StepFailed:
    """What was raised for a step under way; ``is_late``: whether the step has been dropped since."""

    error: Exception
    is_late: Callable[[], bool]

    def raise_if_due(self) -> None:
        """Raise the error, unless the step has been dropped."""
        if not self.is_late():
            raise self.error


class StepsUnderWay(Generic[T]):
    """Steps of one loop, and all that is noted of which are under way.

    failed: called on the waiting thread with what waiting for a step or completing it raised there. When the loop comes
        to it, ``StepFailed.is_late`` says whether that step has been dropped since.
    """

    def __init__(self, failed: Callable[["StepFailed"], None]) -> None:
        self._failed = failed
        self._queue: queue.SimpleQueue[_Entry[T] | None] = queue.SimpleQueue()  # for the thread; ``None``: the end
        self._lock = threading.Lock()  # guards the list
        self._changed = threading.Condition(self._lock)
        self._steps: deque[T] = deque()  # the oldest first; another one begins where all are dropped
        self._broken: deque[T] | None = None  # a list of which a step failed: no more of it are completed
        self._completing = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step is under way."""
        return not self._steps

    def under_way(self) -> list[T]:
        """Return the steps that were launched and are not completed, the oldest first."""
        with self._lock:
            return list(self._steps)

    def add(self, step: T, wait: Callable[[T], object], complete: Callable[[T], None], *, is_done: bool) -> None:
        """Take a step that was launched.

        Args:
            wait: blocks until it is done.
            complete: does what is to be done then; never called if it was dropped, or is behind one that failed.
            is_done: the device computed it at launch, so complete it now.

        Raises:
            Exception: what completing raised, if ``is_done``.
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
        """Block until no step is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_empty)

    def drop(self) -> None:
        """Forget all steps under way. When this returns, none of them will be completed any more."""
        with self._changed:
            self._steps = deque()
            self._changed.notify_all()
        with self._completing:  # one may be half-way
            pass

    def close(self) -> None:
        """Forget all steps under way, and end the thread as soon as it waits for none, without waiting for that. None
        may be added any more."""
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
        """Complete a step when it is done, unless it was dropped or is behind one that failed."""
        try:
            if among is not self._broken and not self._is_dropped(among):
                wait(step)
                with self._completing:
                    if not self._is_dropped(among):
                        complete(step)
        except Exception as error:  # noqa: BLE001 - goes to the loop, which knows what to do about each kind
            if not self._is_dropped(among):
                self._broken = among
                self._failed(StepFailed(error, partial(self._is_dropped, among)))
        with self._changed:
            among.popleft()
            self._changed.notify_all()

    def _is_dropped(self, steps: deque[T]) -> bool:
        return steps is not self._steps
