"""Groups decoding sequences into micro-batches that take turns.

One sequence cannot fill a pipeline: its next token needs the last one to have passed all stages. S groups that take
turns can:

    stage 0    | 0 | 1 | 0 | 1 | 0 |
    stage 1        | 0 | 1 | 0 | 1 | 0 |

A cycle is as long as its longest step. So groups are of equal size, and the steps of a round get equal shares of
prefill (``even_share``). Members stay in their group, because the stages keep the KV of a group together: a new
sequence joins the smallest group, and a group that has become too small gets members from the largest, only as many as
needed. If fewer groups are faster (``core.speculation.chooser``), only the first few are ``active``.
"""

from collections.abc import Callable, Iterable, Set

from splitinfer.core.sequence import Sequence

MIN_CHUNK = 32  # prompt tokens; a smaller further chunk costs more than it saves


def even_share(remaining: int, most: int, num_groups: int, *, rounds: bool, least: int = MIN_CHUNK) -> int:
    """Return the prompt tokens for each of the next steps. ``remaining`` are still to compute, and a step takes
    ``most``.

    The prompt is cut into as few equal steps as possible, but into at least one for each group if each gets ``least``.
    With ``rounds`` (sequences decode, so there are steps anyway) it is cut into whole rounds, because a group without a
    share would leave a bubble. Equal steps are also right for a lone prompt: it takes the sum of all steps once, and
    the longest step once more for each further stage.

    >>> even_share(2200, 512, 2, rounds=False), even_share(2200, 512, 2, rounds=True)
    (440, 367)
    >>> even_share(63, 512, 2, rounds=False), even_share(100, 512, 4, rounds=False)
    (63, 34)
    """
    steps = max(1, min(num_groups, remaining // least), -(-remaining // most))
    if rounds and steps > num_groups:
        steps += -steps % num_groups
    return -(-remaining // steps)


class MicroBatches:
    """The groups of decoding sequences, each in the order of joining, and the group whose turn it is."""

    def __init__(self, num_groups: int) -> None:
        self._groups: list[list[Sequence]] = [[] for _ in range(num_groups)]
        self._id_to_group: dict[int, int] = {}
        self._turn = 0
        self._active = num_groups

    def __len__(self) -> int:
        return len(self._id_to_group)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._id_to_group

    @property
    def ids(self) -> Set[int]:
        """The ids of all members."""
        return self._id_to_group.keys()

    def by_id(self) -> dict[int, Sequence]:
        """Return all members by id."""
        return {seq.seq_id: seq for group in self._groups for seq in group}

    @property
    def largest(self) -> int:
        """The number of members of the largest group."""
        return max(map(len, self._groups))

    def members(self, group: int) -> list[Sequence]:
        """Return a group's members in scheduling order."""
        return list(self._groups[group])

    def may_go(self, group: int, *, alone: bool) -> bool:
        """Return whether the group could have a step now. ``alone``: even without members."""
        return (alone or bool(self._groups[group])) and not self.is_in_flight(group)

    def is_in_flight(self, group: int) -> bool:
        """Return whether the group must wait for a result."""
        return any(seq.num_awaited for seq in self._groups[group])

    def going_on(self, group: int, follows: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return the members that another step of a group in flight could hold: members that ``follows`` lets go after
        their blocks under way, members whose blocks under way are all rejected, and beside such members the idle ones.
        Empty if there are only idle ones and members that wait."""
        members = self._groups[group]
        followers = [seq for seq in members if seq.num_awaited and follows(seq)]
        rejected = [seq for seq in members if not seq.num_awaited and seq.num_in_flight]
        idle = [seq for seq in members if not seq.num_in_flight] if followers or rejected else []
        return [*followers, *rejected, *idle]

    def in_turn(self) -> list[int]:
        """Return all groups, the one whose turn it is first."""
        return [*range(self._turn, len(self._groups)), *range(self._turn)]

    def had_turn(self, group: int, late: Iterable[Sequence]) -> None:
        """Pass the turn on. ``late``: members for which the step had no room; they go first the next time."""
        if ids := {seq.seq_id for seq in late}:
            self._groups[group].sort(key=lambda seq: seq.seq_id not in ids)  # stable: the others keep their order
        self._turn = (group + 1) % len(self._groups)

    def join(self, seq: Sequence) -> None:
        """Add a sequence that begins to decode to the smallest active group. Of equal ones, the next in turn gets
        it."""
        active = (group for group in self.in_turn() if group < self._active)
        group = min(active, key=lambda group: len(self._groups[group]))
        self._groups[group].append(seq)
        self._id_to_group[seq.seq_id] = group

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence from its group, if it has one."""
        group = self._id_to_group.pop(seq.seq_id, None)
        if group is not None:
            self._groups[group].remove(seq)

    def clear(self) -> None:
        """Remove all sequences."""
        for group in self._groups:
            group.clear()
        self._id_to_group.clear()

    def balance(self, active: int | None = None) -> None:
        """Move members, as far as results allow, until active groups differ by at most one and the others are empty. A
        sequence in flight stays, because its result would come in the turn of another group. The last to join moves, so
        that the KV of the others stays in its place. ``active``: use only the first ``active`` groups from now on;
        ``None``: as before."""
        if active is not None:
            self._active = max(1, min(active, len(self._groups)))
        while (seq := self._next_to_move()) is not None:
            self.leave(seq)
            self.join(seq)

    def _next_to_move(self) -> Sequence | None:
        active = self._groups[: self._active]
        least = min(map(len, active))
        too_large = [group for group in sorted(active, key=len, reverse=True) if len(group) >= least + 2]
        crowded = [*self._groups[self._active :], *too_large]
        return next((seq for group in crowded for seq in reversed(group) if not seq.num_in_flight), None)
