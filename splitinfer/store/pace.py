"""How fast a sender sends: as fast as it is asked, or, beside serving, at a rate that leaves the link to the tokens."""

BESIDE_SERVING = 30e6  # bytes a second: a quarter of a gigabit link


class Pace:
    """Says how long to wait before each piece, so that on average no more than ``rate`` bytes a second are sent.

    Time that passed without sending is not made up for. All times are in seconds.
    """

    def __init__(self) -> None:
        self._free_at = 0.0

    def wait(self, now: float, nbytes: int, rate: float | None) -> float:
        """Seconds to wait before sending ``nbytes`` more; ``rate`` in bytes a second, ``None`` for any.

        >>> pace = Pace()
        >>> [pace.wait(now, 10, 100.0) for now in (5.0, 5.0, 5.0, 9.0)]
        [0.0, 0.1, 0.2, 0.0]
        """
        if rate is None:
            self._free_at = now
            return 0.0
        begin = max(now, self._free_at)
        self._free_at = begin + nbytes / rate
        return round(begin - now, 9)
