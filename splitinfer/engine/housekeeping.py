"""The work of both loops, the coordinator's and a worker's, besides handling events.

They keep the machine awake, report this process's memory to other processes, build graphs of likely steps, and give
freed memory back in a pause.
"""

import queue
import time
from typing import Generic, TypeVar

from splitinfer.engine.stage.loader import free_memory
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.models.memory import HeldReport
from splitinfer.system.keep_awake import KeepAwake

T = TypeVar("T")

_PAUSE = 2.0  # seconds without an event; until then, freed memory is kept for the next step


class Housekeeping(Generic[T]):
    """The housekeeping of the loop that reads ``inbox``."""

    def __init__(self, inbox: "queue.SimpleQueue[T]") -> None:
        self._inbox, self._awake, self._held = inbox, KeepAwake(), HeldReport()
        self._pause_at: float | None = time.monotonic() + _PAUSE  # when to free memory; ``None``: that is done

    def watch_machine(self, *, is_needed: bool) -> None:
        """Keep the machine awake if it ``is_needed``, and report the memory that this process holds."""
        now = time.monotonic()
        self._awake.update(is_needed, now)
        self._held.update(now)

    def until_release(self) -> float | None:
        """Return the seconds until the machine may sleep."""
        return self._awake.until_update(time.monotonic())

    def build_ahead(self, runner: StageRunner | None) -> None:
        """Build graphs of likely steps until an event arrives."""
        while runner is not None and self._inbox.empty() and runner.prepare_next():
            pass

    def next_event(self, within: float | None) -> T | None:
        """Wait for the next event and return it. Return None if no event arrives ``within`` the given seconds (None
        sets no limit), or if none has arrived for ``_PAUSE`` seconds."""
        pause = None if self._pause_at is None else max(0.0, self._pause_at - time.monotonic())
        try:
            event = self._inbox.get(timeout=min((each for each in (within, pause) if each is not None), default=None))
        except queue.Empty:
            if self._pause_at is not None and time.monotonic() >= self._pause_at:
                free_memory()
                self._pause_at = None
            return None
        self._pause_at = time.monotonic() + _PAUSE
        return event

    def close(self) -> None:
        """Let the machine sleep."""
        self._awake.close()
