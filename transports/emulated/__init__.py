"""Emulates a slower, worse link on top of any link: latency, bandwidth, jitter and faults from one `LinkProfile`.

    with installed("1gbe"):                  # every connect() of this process, both directions, peers unchanged
        ...
    emulate(link, PRESETS["wifi"])           # one link, what is sent on it
    connect("emulated+tcp://mini:5577?link=wifi&seed=3")  # by address

`profile` describes a link, `wire` delays one direction of it, `faults` decides what goes wrong, `packets` lets the
other end detect it, and `link` puts all of that around a link. `transport` makes such links by address, `process_wide`
emulates every link that a process connects.

Delays and cuts keep the contract of the link below with any peer. To be *corrupted, duplicated,
reordered or dropped*, frames must be packets: with such a profile both ends have to be emulated (`EmulatedTransport`,
or `emulated+` in both addresses).
"""

from transports.emulated.link import EmulatedLink, emulate
from transports.emulated.process_wide import install, installed
from transports.emulated.profile import PRESETS, LinkProfile, preset
from transports.emulated.transport import EmulatedListener, EmulatedTransport
from transports.registry import register_prefix

register_prefix("emulated", EmulatedTransport)

__all__ = [
    "PRESETS",
    "EmulatedLink",
    "EmulatedListener",
    "EmulatedTransport",
    "LinkProfile",
    "emulate",
    "install",
    "installed",
    "preset",
]
