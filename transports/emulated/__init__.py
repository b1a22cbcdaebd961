"""A slower, worse link in front of any link: latency, bandwidth, jitter, and faults, all from one `LinkProfile`.

    with installed("1gbe"):                  # every connect() of this process, both directions, peers unchanged
        ...
    emulate(link, PRESETS["wifi"])           # one link, what is sent on it
    connect("emulated+tcp://mini:5577?link=wifi&seed=3")  # by address

`profile` says what a link is like, `wire` delays one direction of it, `faults` decides what goes wrong, `packets` lets
the other end notice, and `link` is all of that around a link. `transport` makes such links by address, `process_wide`
makes every link of a process one.

Delays and cuts keep the contract of the link below, whoever is at its other end. To be *corrupted, duplicated,
reordered or dropped*, frames must be packets: with such a profile both ends have to be emulated (`EmulatedTransport`,
or `emulated+` in both addresses).
"""

from transports.emulated.link import EmulatedLink, emulate
from transports.emulated.process_wide import address_for_others, install, installed
from transports.emulated.profile import PRESETS, LinkProfile, preset
from transports.emulated.transport import EmulatedListener, EmulatedTransport

__all__ = [
    "PRESETS",
    "EmulatedLink",
    "EmulatedListener",
    "EmulatedTransport",
    "LinkProfile",
    "address_for_others",
    "emulate",
    "install",
    "installed",
    "preset",
]
