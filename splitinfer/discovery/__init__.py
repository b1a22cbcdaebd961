"""Finds workers on this machine's networks, and the addresses of a layout's names.

    worker ── announcer ──(DNS-SD over multicast DNS)──▶ network ──▶ workers ──▶ discover: an address, or a report

A search sees each worker on several interfaces, merges its sightings, measures the way to each of its addresses and
takes the best.

A found worker is not yet trusted: anyone in the network can announce anything. The worker's key, from the layout or
this machine's keyring, identifies a name in a layout; the announced fingerprint only says where to try, and the
encrypted link, which needs the key itself, decides.
"""

import logging

logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
"""zeroconf logs tracebacks for passing trouble: an interface that goes, a network that is down. This package reports
lasting trouble itself."""
