"""What both loops do besides acting on events, the coordinator's and the workers': the machine stays awake, its other
processes know what this one holds, what computes preempts nothing on a pinned stage, and likely steps are built ahead.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.threads import ComputingThread
from splitinfer.models.memory import HeldReport
from splitinfer.system.keep_awake import KeepAwake

T = TypeVar("T")


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

    def next_event(self, within: float | None, *, expecting: bool) -> T | None:
        """Wait for the next event. ``None`` if none came ``within`` so many seconds. ``expecting``: one is likely
        soon."""
        try:
            return self._inbox.get(within, expecting=expecting)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let the machine sleep."""
        self._awake.close()
