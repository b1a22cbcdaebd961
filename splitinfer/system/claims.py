"""What the processes of one machine have announced to need, and what that leaves for another. Pure.

What the system calls free has in it what another process is about to take: a stage that is being read, KV that will
fill up. So each process publishes a claim:

    held                bytes that MLX holds in it now: the system does not call these free any more
    load                bytes that it will surely take besides: weights being read, KV of one context, room to compute
    growth              bytes that KV may take besides, in the course of time, where that is more

What it takes after that is held and not to come any more, so a claim is written again as memory fills up.

The coordinator divides what is free among itself and the workers that it starts (``address: local``), so processes of
such a *group* count each other's ``load`` alone. For everyone else the group also grows: by what its largest growth is,
since each member announces the half of what is free, and gets a part of that.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes of one process. ``group``: the id of the process that divides memory among several, or its own."""

    group: int
    held: int
    load: int
    growth: int = 0

    def encode(self) -> bytes:
        """The claim as it is written to a file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Claim":
        """A claim that was read from a file.

        Raises:
            ValueError: it is not a claim.
        """
        read = json.loads(data)
        names = {field.name for field in fields(cls)}
        if (
            not isinstance(read, dict)
            or set(read) != names
            or not all(type(n) is int and n >= 0 for n in read.values())
        ):
            raise ValueError(f"{data[:80]!r} is not a claim")
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Others:
    """What other processes hold, and what they will take besides: bytes."""

    held: int = 0
    to_come: int = 0


def merged(parts: Collection[Claim], held: int) -> Claim:
    """The claim of a process now that it holds ``held`` bytes, from what its parts announced when it held fewer."""
    now = [
        (max(0, part.load - taken), max(0, part.growth - taken))
        for part in parts
        for taken in (max(0, held - part.held),)
    ]
    group = next(iter(parts)).group
    return Claim(group, max(0, held), sum(load for load, _ in now), sum(growth for _, growth in now))


def sum_up(claims: Iterable[Claim], group: int) -> Others:
    """What the processes of these claims mean to one of ``group``."""
    groups: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        groups[claim.group].append(claim)
    held = sum(claim.held for members in groups.values() for claim in members)
    return Others(held, sum(_to_come(members, is_own=number == group) for number, members in groups.items()))


def _to_come(members: list[Claim], *, is_own: bool) -> int:
    load = sum(claim.load for claim in members)
    return load if is_own else max(load, *(claim.growth for claim in members))


def left_over(available: int, limit: int | None, own: int, others: Others) -> int:
    """Bytes that a process may still take.

    Args:
        available: what the system calls free.
        limit: what the GPU may hold for all processes together; ``None`` without such a limit.
        own: what this process holds of that.
        others: what other processes have announced.
    """
    left = available - others.to_come
    if limit is not None:
        left = min(left, limit - own - others.held - others.to_come)
    return max(0, left)
