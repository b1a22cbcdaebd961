"""How long a connection may take for what, and which one makes room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.server.patience import Limits, Phase, Room, Stillness, Verdict, overdue

LIMITS = Limits(most=3, spare=2, head=20, idle=75, rest=10, unsent=60)


@pytest.mark.parametrize(
    ("phase", "bound", "verdict"),
    [
        (Phase.HEAD, 20, Verdict.TELL),
        (Phase.IDLE, 75, Verdict.CLOSE),
        (Phase.REST, 10, Verdict.CLOSE),
        (Phase.UNSENT, 60, Verdict.ABORT),
    ],
)
def test_each_phase_has_its_bound(phase: Phase, bound: float, verdict: Verdict):
    assert overdue(phase, bound - 0.1, LIMITS) is None
    assert overdue(phase, bound, LIMITS) is verdict


def test_an_answer_may_take_as_long_as_it_takes():
    assert overdue(Phase.ANSWER, 1e9, LIMITS) is None


def test_whoever_sent_nothing_is_told_nothing():
    assert overdue(Phase.HEAD, 20, LIMITS, has_begun=False) is Verdict.CLOSE


def test_time_counts_from_the_last_progress_in_one_phase():
    still = Stillness(100.0)
    assert still.look(Phase.HEAD, 0, 107.0) == 7.0
    assert still.look(Phase.UNSENT, 500, 110.0) == 0.0
    assert still.look(Phase.UNSENT, 500, 130.0) == 20.0
    assert still.look(Phase.UNSENT, 499, 131.0) == 0.0
    assert still.look(Phase.UNSENT, 499, 191.0) == 60.0
    assert still.look(Phase.IDLE, 0, 192.0) == 0.0


def test_the_one_that_waits_longest_makes_room():
    room = Room[str](LIMITS)
    for number, name in enumerate("abc", 1):
        assert room.arrived(name, number) is None
        room.waits(name)
    room.works("a")
    room.waits("a")  # its request is answered, so it waits since just now
    assert room.arrived("d", 4) == "b"
    room.waits("d")
    room.works("c")
    assert room.arrived("e", 4) == "a"


def test_where_all_are_in_use_the_next_are_told_and_further_ones_are_not():
    room = Room[int](LIMITS)
    for number in range(1, 4):
        assert room.arrived(number, number) is None
        assert not room.is_over(number)
    for number in (4, 5):
        assert room.arrived(number, number) is None
        assert room.is_over(number)
    assert room.arrived(6, 6) == 6


@given(st.lists(st.tuples(st.sampled_from(["arrive", "ask", "answered", "leave"]), st.integers(0, 30)), max_size=60))
def test_there_are_never_more_than_told(events: list[tuple[str, int]]):
    """Whatever comes and goes, those in use stay, and the number of connections is bounded."""
    room, connections, busy = Room[int](LIMITS), list[int](), set[int]()
    for number, (what, which) in enumerate(events):
        if what == "arrive":
            connections.append(number)
            gone = room.arrived(number, len(connections))
            if gone is not None:
                assert gone not in busy
                connections.remove(gone)
            if gone != number:
                room.waits(number)
        elif connections:
            one = connections[which % len(connections)]
            if what == "ask":
                room.works(one)
                busy.add(one)
            elif what == "answered":
                busy.discard(one)
                room.waits(one)
            else:
                room.works(one)
                busy.discard(one)
                connections.remove(one)
        assert len(connections) <= LIMITS.most + LIMITS.spare
