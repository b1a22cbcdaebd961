"""Finds workers on the networks of this machine, and where a layout's names are.

    worker ── announcer ──(DNS-SD over multicast DNS)──▶ network ──▶ workers ──▶ an address, or a report

A worker announces what a coordinator has to know before it connects. Whoever looks around sees each worker on several
interfaces, makes one of its sightings, measures the way to each of its addresses and takes the best.

Nobody is admitted for being found. Announcements are not authenticated: anyone in the network can send any. So a name
in a layout is found by the worker's key, which the layout or this machine's keyring holds; the announced fingerprint
only says where to try, and the encrypted link, which needs the key itself, decides.

    announcement  what is announced, as the properties of a TXT record and back. Pure
    workers       sightings as workers, which of them a stage means, which of its addresses. Pure
    report        what was found, for people and as JSON. Pure
    network       browses, connects
    discover      the list; the addresses of a layout's names
    announcer     announces a worker, in its process
"""

import logging

logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
"""It warns with tracebacks of what passes: an interface that goes, a network that is down. What stays is told here."""
