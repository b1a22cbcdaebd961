"""When this machine's sleep is to be prevented. Pure: a clock's values in, a decision out.

                 busy                        busy
    released ───────────▶ held ──idle──▶ lingering ──▶ held
        ▲                                    │
        └──────── ``linger`` seconds ────────┘

macOS sleeps after minutes without a person at the keyboard, whatever a process computes, unless one has asked it not
to. To ask costs a message to the power daemon, so it is not done for each request: a conversation's pauses are bridged.
"""

LINGER = 60.0  # seconds: longer than the pauses between requests of a program, shorter than any setting for sleep


class Wakefulness:
    """Whether to hold off sleep. Times are in seconds, of one clock."""

    def __init__(self, linger: float = LINGER) -> None:
        self._linger = linger
        self._busy_at: float | None = None  # when there was work last; ``None``: long ago

    def update(self, is_busy: bool, now: float) -> bool:
        """Whether sleep is to be prevented from ``now`` on, given whether there is work."""
        if is_busy:
            self._busy_at = now
        elif self.until_release(now) == 0:
            self._busy_at = None
        return self._busy_at is not None

    def until_release(self, now: float) -> float | None:
        """Seconds after which ``update`` has to be called again if no work comes; ``None``: it has not."""
        return None if self._busy_at is None else max(0.0, self._busy_at + self._linger - now)
