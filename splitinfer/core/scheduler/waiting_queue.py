"""The queue of waiting sequences, and the deadlines of all sequences.

Both are sorted lists of keys, of at most a few thousand. Inserting by bisection takes a microsecond, and, unlike in a
heap, an entry in the middle can be removed at once.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from splitinfer.core.sequence import Sequence

QueueKey = tuple[int, bool, float, int]


class WaitingQueue:
    """The waiting sequences in admission order.

    The highest priority comes first, then sequences that were preempted (they have waited once already, and their
    reader has seen the beginning), then the earliest deadline, then the earliest arrival.
    """

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._id_to_sequence: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        return (self._id_to_sequence[key[-1]] for key in self._keys)

    def get(self, seq_id: int) -> Sequence | None:
        """Return the sequence with this id, or None if it does not wait."""
        return self._id_to_sequence.get(seq_id)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Its priority, deadline and number of preemptions must not change while it waits."""
        insort(self._keys, _key(seq))
        self._id_to_sequence[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence from any place in the queue."""
        del self._keys[bisect_left(self._keys, _key(seq))]
        del self._id_to_sequence[seq.seq_id]


def _key(seq: Sequence) -> QueueKey:
    deadline = math.inf if seq.deadline is None else seq.deadline
    return -seq.priority, seq.num_preemptions == 0, deadline, seq.seq_id


class Deadlines:
    """The deadlines of all sequences that have one, in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []

    def add(self, seq: Sequence) -> None:
        """Add a sequence's deadline, if it has one."""
        if seq.deadline is not None:
            insort(self._keys, (seq.deadline, seq.seq_id))

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence's deadline, if it has one."""
        if seq.deadline is not None:
            del self._keys[bisect_left(self._keys, (seq.deadline, seq.seq_id))]

    def over(self, now: float) -> list[int]:
        """Return the ids of the sequences whose deadline is at or before ``now``, earliest first."""
        return [seq_id for _, seq_id in self._keys[: bisect_left(self._keys, (now, math.inf))]]

    @property
    def next(self) -> float | None:
        """The earliest deadline; ``None`` if there is none."""
        return self._keys[0][0] if self._keys else None
