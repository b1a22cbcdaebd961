"""The worker's end of the process that announces it. Nothing here fails the worker: what cannot be announced is
logged."""

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from splitinfer import cleanup
from splitinfer.discovery.announcer import Order, order_to_line
from splitinfer.discovery.means import means_here
from splitinfer.discovery.sentences import NONE_HERE

log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds between two looks at the free memory
_WORTH = 0.05  # of all memory: a smaller change is not announced, because each is sent to every device
_ENDING = 1.0  # seconds for a goodbye


class Announcing:
    """An announced worker, or none if there is no ``order``. ``free``: reads the free memory, in bytes."""

    def __init__(
        self,
        order: Order | None,
        free: Callable[[], int],
        now: Callable[[], float] = time.monotonic,
        start: Callable[[], "subprocess.Popen[bytes] | None"] | None = None,
    ) -> None:
        self._order, self._free, self._now = order, free, now
        self._due = now() + _EVERY
        self._process = None if order is None else (start or _start)()
        self._send()

    def tick(self) -> None:
        """Announce the free memory if it is another; to be called about once a second."""
        if self._order is None or self._now() < self._due:
            return
        self._due = self._now() + _EVERY
        announcement = self._order.announcement
        free = self._free()
        if abs(free - announcement.free) >= _WORTH * announcement.memory:
            self._order = replace(self._order, announcement=replace(announcement, free=free))
            self._send()

    def withdraw(self) -> None:
        """Have the announcement withdrawn, without waiting."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def close(self) -> None:
        """Withdraw the announcement, and wait a moment for that."""
        self.withdraw()
        if self._process is not None:
            try:
                self._process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _send(self) -> None:
        if self._order is None or self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it has ended, and has said why
            self._process.stdin.write(order_to_line(self._order).encode())
            self._process.stdin.flush()


def is_possible() -> bool:
    """Whether workers can be announced from here; if not, the log says why."""
    if means_here() is None:
        log.info("this worker is not announced: %s", NONE_HERE)
        return False
    return True


def _start() -> "subprocess.Popen[bytes] | None":
    try:
        # A session of its own: Ctrl-C in the terminal is the worker's, which then says goodbye.
        return cleanup.start(
            (sys.executable, "-m", "splitinfer.discovery.announcer"), stdin=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        log.warning("this worker is not announced: %s", error)
        return None
