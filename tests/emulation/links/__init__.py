"""Emulates a slower link on top of any link: latency, bandwidth and jitter from one `LinkProfile`.

    with installed("1gbe"):                  # every connect() of this process, both directions, peers unchanged
        ...
    EmulatedLink(link, PRESETS["wifi"])      # one link, what is sent on it
    connect("emulated+tcp://mini:5577?link=wifi&seed=3")  # by address

`profile` describes a link, `wire` delays one direction of it, `link` puts that around a link, and `transport` makes
such links by address. An emulated link keeps the contract of the one below, with any peer.
"""

from tests.emulation.links.link import EmulatedLink
from tests.emulation.links.profile import PRESETS, LinkProfile, preset
from tests.emulation.links.transport import EmulatedTransport, installed
from transports.registry import TRANSPORTS, known

TRANSPORTS.update({f"emulated+{scheme}": EmulatedTransport(TRANSPORTS[scheme]) for scheme in known()})

__all__ = ["PRESETS", "EmulatedLink", "EmulatedTransport", "LinkProfile", "installed", "preset"]
