"""Who waits, and whose time is over.

Both are sorted lists of keys: some thousand requests at most, where inserting by bisection costs a microsecond
and, unlike in a heap, whoever leaves from the middle is gone at once.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from splitinfer.core.sequence import Sequence

Key = tuple[int, bool, float, int, int]


class QueueFull(ValueError):
    """As many requests wait as may wait."""


class WaitingQueue:
    """Sequences in the order in which they will be admitted.

    Highest priority first, then whoever had to give up its KV (it has waited once already, and a reader has
    seen its beginning), then the earliest deadline, then first come first served.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._id_to_sequence: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._id_to_sequence[key[-1]] for key in self._keys)

    def get(self, seq_id: int) -> Sequence | None:
        """The sequence, if it waits."""
        return self._id_to_sequence.get(seq_id)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; what its place depends on must not change while it waits."""
        insort(self._keys, _key(seq))
        self._id_to_sequence[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._keys[bisect_left(self._keys, _key(seq))]
        del self._id_to_sequence[seq.seq_id]


def _key(seq: Sequence) -> Key:
    deadline = math.inf if seq.deadline is None else seq.deadline
    return -seq.priority, seq.num_preemptions == 0, deadline, seq.arrival, seq.seq_id


class Deadlines:
    """The deadlines of all that have one, in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []

    def add(self, seq: Sequence) -> None:
        """Watch a sequence; nothing to do if it has no deadline."""
        if seq.deadline is not None:
            insort(self._keys, (seq.deadline, seq.seq_id))

    def remove(self, seq: Sequence) -> None:
        """Watch it no more."""
        if seq.deadline is not None:
            del self._keys[bisect_left(self._keys, (seq.deadline, seq.seq_id))]

    def over(self, now: float) -> list[int]:
        """Who should have ended by ``now``, earliest first."""
        return [seq_id for _, seq_id in self._keys[: bisect_left(self._keys, (now, math.inf))]]

    @property
    def next(self) -> float | None:
        """When the earliest ends."""
        return self._keys[0][0] if self._keys else None
