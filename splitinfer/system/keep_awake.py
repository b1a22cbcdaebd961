"""Keeps this machine awake while it has work, and a little longer.

macOS sleeps after minutes without a person at the keyboard, even if a process computes. ``caffeinate -i -w PID``
prevents that until it ends or this process ends; the display may sleep. It does not prevent sleep that a person asks
for, a closed lid or an empty battery. Because each start takes a process, it also bridges the pauses of a conversation.
"""

import logging
import os
import subprocess
from collections.abc import Callable

from splitinfer.system import apple

log = logging.getLogger(__name__)

VARIABLE = "SPLITINFER_STAY_AWAKE"  # "0": this process prevents no sleep
LINGER = 60.0  # seconds: longer than the pauses between requests of a program, shorter than any setting for sleep

Release = Callable[[], None]

_CAFFEINATE = "/usr/bin/caffeinate"


class KeepAwake:
    """Prevents sleep while there is work, and ``LINGER`` seconds longer. Only one thread may use it; times are in
    seconds of one clock."""

    def __init__(self) -> None:
        self._busy_at: float | None = None  # the last time of work; ``None``: long ago
        self._release: Release | None = None
        self._has_warned = False

    def update(self, is_busy: bool, now: float) -> None:
        """Say whether there is work now."""
        if is_busy:
            self._busy_at = now
            if self._release is None:
                self._release = self._begin()
        elif self.until_update(now) == 0:
            self.close()

    def until_update(self, now: float) -> float | None:
        """Return the seconds until ``update`` must be called even if nothing happens, or None if it need not be."""
        return None if self._busy_at is None else max(0.0, self._busy_at + LINGER - now)

    def close(self) -> None:
        """Let the machine sleep."""
        release, self._release, self._busy_at = self._release, None, None
        if release is not None:
            release()

    def _begin(self) -> Release:
        try:
            return prevent_idle_sleep()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("this machine may go to sleep while it is needed: %s", error)
            return _nothing  # the next work tries again


def _nothing() -> None:
    pass


def prevent_idle_sleep() -> Release:
    """Prevent this machine's idle sleep until the caller calls the returned function. Do nothing except on macOS, or
    if ``SPLITINFER_STAY_AWAKE`` is 0.

    Raises:
        OSError: caffeinate cannot be started.
    """
    if not apple.is_macos() or os.environ.get(VARIABLE) == "0":
        return _nothing
    child = subprocess.Popen(
        [_CAFFEINATE, "-i", "-w", str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        child.kill()  # it has nothing to clean up
        child.wait()

    return end
