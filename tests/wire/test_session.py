"""Both ends of a link go by one table: what they say passes, all else does not, and nothing follows the end."""

from collections.abc import Sequence
from itertools import product

import pytest
from every_message import EXAMPLES

from splitinfer.errors import ProtocolError
from splitinfer.wire.headers import Phase, Session, encode
from splitinfer.wire.messages import Fault, Hello, Message, Versions

Word = tuple[str, str]  # direction, kind

ROLES = ("coordinator", "upstream", "reader", "probe")
WELCOME = [("down", "hello"), ("up", "welcome")]
LOADED = [*WELCOME, ("down", "load"), ("up", "progress"), ("up", "ready")]
PROBE = [("down", "probe"), ("up", "probed")]
PROFILE = [("down", "profile"), ("up", "progress"), ("up", "profiled")]
STEPS = [("down", "plan"), ("down", "rows"), ("down", "plan"), ("up", "result"), ("down", "rows"), ("up", "result")]

CONVERSATIONS: list[tuple[str, list[Word]]] = [
    ("coordinator", [*LOADED, ("down", "connect"), ("up", "connected"), *STEPS, ("up", "fault")]),
    ("coordinator", [*WELCOME, *PROFILE, *PROBE, *PROBE, ("down", "load"), ("up", "ready"), *STEPS]),
    ("coordinator", [
        *WELCOME, ("down", "load"), ("up", "askmanifest"), ("down", "tellmanifest"), ("up", "askranges"),
        ("up", "askranges"), ("down", "tellrange"), ("up", "progress"), ("down", "unavailable"), ("up", "refuse"),
    ]),
    ("coordinator", [
        *WELCOME, ("down", "connect"), ("up", "connected"), ("down", "load"), ("up", "gather"), ("down", "gather"),
        ("up", "ready"), ("down", "shown"), ("down", "plan"), ("up", "digest"), ("down", "rows"), ("up", "result"),
    ]),
    ("coordinator", [*WELCOME, ("down", "spawn"), ("up", "spawned")]),
    ("coordinator", [*WELCOME, ("down", "meet"), ("up", "gather"), ("down", "gather"), ("up", "met")]),
    ("coordinator", [*WELCOME, ("down", "load"), ("up", "fault")]),
    ("upstream", [*WELCOME, ("down", "shown"), ("down", "plan"), ("down", "rows"), ("up", "fault")]),
    ("reader", [
        *WELCOME, ("down", "askmanifest"), ("up", "unavailable"), ("down", "askmanifest"), ("up", "tellmanifest"),
        ("down", "askranges"), ("up", "tellrange"), ("up", "fault"),
    ]),
    ("probe", WELCOME),
    *((role, [("down", "hello"), ("up", "refuse")]) for role in (*ROLES, "king")),
]  # fmt: skip


def message(role: str, kind: str) -> Message:
    return Hello(role, "n", "s", Versions(1, "", "", "")) if kind == "hello" else EXAMPLES[kind]


class Ends:
    """The two sessions of one link."""

    def __init__(self, role: str, words: Sequence[Word] = ()) -> None:
        self.role, self.opener, self.answerer = role, Session(opened=True), Session(opened=False)
        for word in words:
            assert self.may(word), word

    def may(self, word: Word) -> bool:
        """Say something; whether both ends let it pass. They must be of one opinion."""
        direction, kind = word
        sender, receiver = (self.opener, self.answerer) if direction == "down" else (self.answerer, self.opener)
        said, before = message(self.role, kind), self.opener.phase
        complaints = []
        for take in (lambda: sender.encode(said), lambda: receiver.decode(encode(said))):
            try:
                take()
            except ProtocolError as error:
                complaints.append(str(error))
        assert self.opener.phase is self.answerer.phase
        if not complaints:
            return True
        rest = f"a {kind} message that is not allowed in the phase '{before.value}'"
        assert complaints == [f"about to send {rest}", f"the peer sent {rest}"]
        assert self.opener.phase is before
        return False


def test_a_phase_allows_what_conversations_need_and_no_more() -> None:
    """Also that nothing follows the end, and a probe's link has no messages."""
    needed: dict[tuple[str, Phase], set[Word]] = {}
    roads: dict[tuple[str, Phase], list[Word]] = {}
    for role, words in CONVERSATIONS:
        for at, word in enumerate([*words, None]):
            place = role, Ends(role, words[:at]).opener.phase
            roads.setdefault(place, words[:at])
            needed.setdefault(place, set()).update([] if word is None else [word])
    for (role, phase), road in roads.items():
        allowed = {word for word in product(("down", "up"), EXAMPLES) if Ends(role, road).may(word)}
        welcome = {("up", "welcome")} if role == "king" and phase is Phase.HELLO else set()  # which no worker sends
        assert allowed - welcome == needed[role, phase], (role, phase)
    assert {phase for _, phase in roads} == set(Phase)


def test_a_header_that_is_no_message_changes_nothing() -> None:
    session = Session(opened=False)
    with pytest.raises(ProtocolError, match="cannot be read"):
        session.decode(b"\xc1")
    with pytest.raises(ProtocolError, match="a fault message that is not allowed in the phase 'hello'"):
        session.decode(encode(Fault("x", False, False)))
    assert session.phase is Phase.HELLO
