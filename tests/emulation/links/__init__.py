"""Emulates a slower link on top of any link: latency, bandwidth and jitter from one `LinkProfile`.

    with installed(LinkProfile(0.003)):      # every connect() of this process, both directions, peers unchanged
        ...
    EmulatedLink(link, LinkProfile(0.003))   # one link, what is sent on it
    connect("emulated+tcp://mini:5577?latency=0.003")  # by address

`profile` describes a link, `wire` delays one direction of it, `link` puts that around a link, and `transport` makes
such links by address. An emulated link keeps the contract of the one below, with any peer.
"""

from tests.emulation.links.link import EmulatedLink
from tests.emulation.links.profile import LinkProfile
from tests.emulation.links.transport import EmulatedTransport, installed
from transports.registry import TRANSPORTS, known

TRANSPORTS.update({f"emulated+{scheme}": EmulatedTransport(TRANSPORTS[scheme]) for scheme in known()})

__all__ = ["EmulatedLink", "EmulatedTransport", "LinkProfile", "installed"]
