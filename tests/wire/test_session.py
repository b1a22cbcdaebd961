"""Both ends walk the same table, and only along what the conversations need."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from test_codec import EXAMPLES

from splitinfer.errors import ProtocolError
from splitinfer.wire.session import Session, State

Word = tuple[str, str]  # direction, kind
WORDS: tuple[Word, ...] = tuple(itertools.product(("down", "up"), EXAMPLES))

HELLO = [("down", "hello"), ("up", "welcome")]
PROFILE = [("down", "profile"), ("up", "progress"), ("up", "progress"), ("up", "profiled")]
LOADED = [*HELLO, ("down", "load"), ("up", "progress"), ("up", "progress"), ("up", "ready")]
CLOCK = [("down", "clockask"), ("up", "clocktell")]
CONNECT = [("down", "connect"), ("up", "connected")]
PROBE = [("down", "probe"), ("up", "probed")]
JOINED = [*LOADED, *CONNECT]
STEPS = [("down", "step"), ("down", "step"), ("up", "result"), ("down", "step"), ("up", "result"), ("up", "result")]
STREAM = [*HELLO, ("down", "step"), ("down", "step")]

CONVERSATIONS = {
    "control link of a worker in the middle": [*JOINED, ("up", "fault")],
    "control link of the last worker, in which steps arrive on the data link": [
        *LOADED, ("up", "result"), ("up", "result"), ("up", "fault"),
    ],
    "weights copied while it loads": [
        *HELLO, ("down", "load"), ("up", "askmanifest"), ("down", "tellmanifest"), ("up", "askranges"),
        ("up", "askranges"), ("down", "tellrange"), ("up", "progress"), ("down", "tellrange"),
        ("up", "ready"), *STEPS,
    ],
    "no weights to copy": [
        *HELLO, ("down", "load"), ("up", "askmanifest"), ("down", "unavailable"), ("up", "progress"), ("up", "refuse"),
    ],
    "a reader": [
        *HELLO, ("down", "askmanifest"), ("up", "unavailable"), ("down", "askmanifest"), ("up", "tellmanifest"),
        ("down", "askranges"), ("up", "tellrange"), ("up", "fault"),
    ],
    "asked for the time, twice": [*JOINED, *CLOCK, *CLOCK, *STEPS],
    "told what is void": [*JOINED, ("down", "step"), ("down", "void"), ("down", "step"), ("up", "result")],
    "failed when asked for the time": [*LOADED, ("down", "clockask"), ("up", "fault")],
    "only looked at": [*HELLO, *CLOCK, *CLOCK, *PROBE, *PROBE],
    "looked at, and then used": [*HELLO, *PROBE, *CLOCK, ("down", "load"), ("up", "ready"), *STEPS],
    **{
        f"failed with nothing loaded, asked to {kind}": [*HELLO, ("down", kind), ("up", "fault")]
        for kind in ("clockask", "probe")
    },
    "two stages: steps and results on one link": [*LOADED, *STEPS, ("up", "fault")],
    "a step may be sent before the link to the next stage stands": [
        *LOADED, ("down", "step"), ("down", "connect"), ("up", "connected"), ("down", "step"),
    ],
    "data link": [*STREAM, ("up", "fault")],
    "measured, its link too, and then used": [*HELLO, *PROFILE, *PROBE, *PROFILE, ("down", "load"), ("up", "ready")],
    "refused to be measured": [*HELLO, ("down", "profile"), ("up", "progress"), ("up", "refuse")],
    "failed while it was measured": [*HELLO, ("down", "profile"), ("up", "fault")],
    "refused at the door": [("down", "hello"), ("up", "refuse")],
    "refused to load": [*HELLO, ("down", "load"), ("up", "progress"), ("up", "refuse")],
    "failed to load": [*HELLO, ("down", "load"), ("up", "fault")],
    "failed to join": [*LOADED, ("down", "connect"), ("up", "fault")],
    "failed before it was asked anything": [*HELLO, ("up", "fault")],
}  # fmt: skip


class Ends:
    """The two sessions of one link."""

    def __init__(self, words: Sequence[Word] = ()) -> None:
        self.opener, self.answerer = Session(opened=True), Session(opened=False)
        for word in words:
            self.say(word)

    def moves(self, word: Word) -> tuple[Callable[[], None], Callable[[], None]]:
        """What the word's sender and its receiver do."""
        direction, kind = word
        sender, receiver = (self.opener, self.answerer) if direction == "down" else (self.answerer, self.opener)
        return lambda: sender.sending(EXAMPLES[kind]), lambda: receiver.received(EXAMPLES[kind])

    def say(self, word: Word) -> None:
        for move in self.moves(word):
            move()
        assert self.opener.state is self.answerer.state


def complaint(move: Callable[[], None]) -> str | None:
    """What is said against a move, if anything."""
    try:
        move()
    except ProtocolError as error:
        return str(error)
    return None


def is_legal(before: Sequence[Word], word: Word) -> bool:
    """Whether a word may follow; both ends must be of one opinion, and stay where they are if it may not."""
    ends = Ends(before)
    state = ends.opener.state
    sent, received = (complaint(move) for move in ends.moves(word))
    assert ends.opener.state is ends.answerer.state
    if sent is None and received is None:
        return True
    rest = f"a {word[1]} message, which cannot follow in state '{state.value}'"
    assert (sent, received) == (f"about to send {rest}", f"the peer sent {rest}")
    assert ends.opener.state is state
    return False


def roads() -> dict[State, list[Word]]:
    """The shortest way to every state that can be reached, found by trying every word in every state."""
    found: dict[State, list[Word]] = {State.NEW: []}
    queue = [State.NEW]
    while queue:
        before = found[queue.pop(0)]
        for word in WORDS:
            if is_legal(before, word):
                state = Ends([*before, word]).opener.state
                if state not in found:
                    found[state] = [*before, word]
                    queue.append(state)
    return found


ROADS = roads()


def test_every_state_can_be_reached():
    assert set(ROADS) == set(State)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations(name: str):
    Ends(CONVERSATIONS[name])


def test_only_what_conversations_need_may_be_said():
    used: dict[State, set[Word]] = {state: set() for state in State}
    for words in CONVERSATIONS.values():
        ends = Ends()
        for word in words:
            used[ends.opener.state].add(word)
            ends.say(word)
    assert used == {state: {word for word in WORDS if is_legal(ROADS[state], word)} for state in State}


@pytest.mark.parametrize("word", WORDS)
def test_nothing_follows_the_end(word: Word):
    assert not is_legal([*HELLO, ("up", "fault")], word)
