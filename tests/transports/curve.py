"""tcp:// and rdma:// with keys as two more schemes, `curve+tcp://` and `curve+rdma://`, for checks that take an address
and nothing else: both ends have the same key pair, and admit it."""

from __future__ import annotations

import os
from dataclasses import replace

from transports import KeyPair, Link, LinkOptions, Listener, Security, Transport
from transports.registry import TRANSPORTS

VARIABLE = "SPLITINFER_TEST_KEY"  # by which a process that a test starts has the same pair
OWN = KeyPair(*os.environ[VARIABLE].split(":")) if VARIABLE in os.environ else KeyPair.make()


def secured(options: LinkOptions, own: KeyPair = OWN, peer: str = OWN.public) -> LinkOptions:
    return replace(options, security=Security(own, peer, lambda key: key == peer))


class Curve:
    def __init__(self, plain: Transport) -> None:
        self._plain = plain

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        return self._plain.connect(address.removeprefix("curve+"), timeout=timeout, options=secured(options))

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        listener = self._plain.listen(address.removeprefix("curve+"), options=secured(options))
        listener.address = f"curve+{listener.address}"
        return listener


TRANSPORTS.update({f"curve+{scheme}": Curve(TRANSPORTS[scheme]) for scheme in ("tcp", "rdma")})
