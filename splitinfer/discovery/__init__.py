"""Finds workers on the networks of this machine, and where a layout's names are.

    worker ── announcer ──(DNS-SD over multicast DNS)──▶ network ──▶ workers ──▶ discover: an address, or a report

Whoever looks around sees each worker on several interfaces, makes one of its sightings, measures the way to each of its
addresses and takes the best.

Nobody is admitted for being found: anyone in the network can announce anything. A name in a layout is found by the
worker's key, which the layout or this machine's keyring holds; the announced fingerprint only says where to try, and
the encrypted link, which needs the key itself, decides.
"""

import logging

logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
"""It warns with tracebacks of what passes: an interface that goes, a network that is down. What stays is told here."""
