"""What both loops do besides acting on events, the coordinator's and the workers'.

They keep the machine awake, tell other processes what this one holds, and build likely steps ahead.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.stage.runner import StageRunner
from splitinfer.models.memory import HeldReport
from splitinfer.system.keep_awake import KeepAwake

T = TypeVar("T")


class Housekeeping(Generic[T]):
    """Of the loop that reads ``inbox``."""

    def __init__(self, inbox: "queue.SimpleQueue[T]") -> None:
        self._inbox, self._awake, self._held = inbox, KeepAwake(), HeldReport()

    def watch_machine(self, *, is_needed: bool) -> None:
        """Keep the machine awake while it ``is_needed``, and report the memory that this process holds."""
        now = time.monotonic()
        self._awake.update(is_needed, now)
        self._held.update(now)

    def until_release(self) -> float | None:
        """Return the seconds until the machine may sleep."""
        return self._awake.until_update(time.monotonic())

    def build_ahead(self, runner: StageRunner | None) -> None:
        """Build graphs of steps that are likely to come, until an event comes."""
        while runner is not None and self._inbox.empty() and runner.prepare_next():
            pass

    def next_event(self, within: float | None) -> T | None:
        """Return the next event, or ``None`` if none came ``within`` so many seconds (``None`` waits without a
        limit)."""
        try:
            return self._inbox.get(timeout=within)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let the machine sleep."""
        self._awake.close()
