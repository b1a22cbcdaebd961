"""Finds out whether the sums of two ranks, which sockets do not encrypt, would leave a cable between their machines.

The answer depends on the interface that the system uses towards the other machine. The address does not show it:
without DHCP, a Wi-Fi interface also gives itself an address of 169.254.
"""

from splitinfer.core.link_transport import RING
from splitinfer.system.interface_kind import is_direct
from splitinfer.system.interfaces import local_interfaces, source_towards


def leads_over_cable(host: str) -> bool:
    """Return whether packets from this machine to an IPv4 address stay on a cable, or on this machine."""
    own = source_towards(host)
    return own is not None and is_direct(own, local_interfaces())


def would_cross(host: str) -> str:
    """Return the end of a sentence that refuses sums to ``host``."""
    return (
        f"would cross the network at {host}, and {RING} does not encrypt them: give the ranks' addresses on a cable "
        "between the two machines, or --insecure-sums if you trust that network"
    )
