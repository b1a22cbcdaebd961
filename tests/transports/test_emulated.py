"""Emulated links: no frame is early. ``test_contract.py`` has them, too."""

from __future__ import annotations

import time

from contract import SECONDS

import transports
from tests.emulation import links as emulated
from tests.emulation.links import LinkProfile
from transports import Frame


def test_an_address_makes_the_same_link_elsewhere() -> None:
    assert transports.address_for_others("inproc://elsewhere") == "inproc://elsewhere"
    with emulated.installed(LinkProfile(latency=0.05, bytes_per_second=1e16)):
        address = transports.address_for_others("inproc://elsewhere")
        assert transports.address_for_others(address) == address
    with transports.listen("inproc://elsewhere") as listener:
        there = transports.connect(address, timeout=SECONDS)
        here = listener.accept(SECONDS)
        for sender, receiver in ((here, there), (there, here)):
            started = time.monotonic()
            sender.send(Frame(b"ping"))
            receiver.recv(SECONDS)
            assert time.monotonic() - started >= 0.05
        there.close()
