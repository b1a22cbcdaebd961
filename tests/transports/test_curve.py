"""Links with keys: who has the wrong one, or none, gets nothing; and the listener serves on."""

from __future__ import annotations

import pytest
from contract import QUICK, SECONDS
from curve import OWN, secured

import transports
from transports import Frame, KeyPair, LinkOptions, LinkRefused, LinkTimeout, Security, check_key

LOOPBACK = "tcp://127.0.0.1:0"
OTHER = KeyPair.make()


def test_both_ends_know_whom_they_talk_to() -> None:
    with transports.listen(LOOPBACK, options=secured(QUICK, OWN, OTHER.public)) as listener:
        here = transports.connect(listener.address, timeout=SECONDS, options=secured(QUICK, OTHER, OWN.public))
        there = listener.accept(SECONDS)
        assert (here.peer_key, there.peer_key) == (OWN.public, OTHER.public)
        here.send(Frame(b"secret", (b"x" * 100_000,)))
        assert there.recv(SECONDS).header == b"secret"
        here.abort()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (QUICK, "one end of the link is encrypted and the other is not"),
        (secured(QUICK, OTHER, OWN.public), "it does not admit this machine's key"),
        (secured(QUICK, OWN, OTHER.public), "it does not have the expected key"),
    ],
    ids=["no key", "a stranger's key", "another listener's key"],
)
def test_who_is_not_admitted_hears_why_and_gets_nothing(options: LinkOptions, reason: str) -> None:
    with transports.listen(LOOPBACK, options=secured(QUICK)) as listener:
        with pytest.raises(LinkRefused, match=reason):
            transports.connect(listener.address, timeout=SECONDS, options=options)
        with pytest.raises(LinkTimeout):
            listener.accept(0.2)
        check_serves(listener.address, listener)


def check_serves(address: str, listener: transports.Listener) -> None:
    link = transports.connect(address, timeout=SECONDS, options=secured(QUICK))
    there = listener.accept(SECONDS)
    link.send(Frame(b"still here"))
    assert there.recv(SECONDS).header == b"still here"
    link.abort()


def test_a_listener_admits_whom_it_comes_to_know() -> None:
    known: set[str] = set()
    options = LinkOptions(
        beat_every=0.02, dead_after=2.0, security=Security(OWN, None, lambda key: key in known)
    )  # fmt: skip
    mine = secured(QUICK, OTHER, OWN.public)
    with transports.listen(LOOPBACK, options=options) as listener:
        with pytest.raises(LinkRefused):
            transports.connect(listener.address, timeout=SECONDS, options=mine)
        known.add(OTHER.public)
        transports.connect(listener.address, timeout=SECONDS, options=mine).abort()


def test_two_listeners_of_one_process_admit_each_its_own() -> None:
    first, second = secured(QUICK, OWN, OWN.public), secured(QUICK, OTHER, OTHER.public)
    with transports.listen(LOOPBACK, options=first) as one, transports.listen(LOOPBACK, options=second) as two:
        transports.connect(one.address, timeout=SECONDS, options=first).abort()
        transports.connect(two.address, timeout=SECONDS, options=second).abort()
        with pytest.raises(LinkRefused):
            transports.connect(one.address, timeout=SECONDS, options=secured(QUICK, OTHER, OWN.public))


@pytest.mark.parametrize("wrong", ["", "0" * 63, "G" * 64, "0" * 65, "A" * 64])
def test_what_is_no_key(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not a key"):
        check_key(wrong)


def test_halves_of_two_keys_do_not_make_one() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        KeyPair(OWN.public, OTHER.secret)
    assert OWN.secret not in repr(OWN)


def test_connecting_needs_the_listeners_key() -> None:
    with pytest.raises(ValueError, match="needs the listener's key"):
        transports.connect("tcp://127.0.0.1:1", timeout=1, options=LinkOptions(security=Security(OWN)))
