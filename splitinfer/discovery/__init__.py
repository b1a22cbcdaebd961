"""Finds workers on the networks of this machine, and where a layout's names are.

    worker ── announcer ──(DNS-SD over multicast DNS)──▶ browsing ──▶ sightings ──▶ workers ──▶ choosing ──▶ address
                                                                                          ▲
                                                                    measuring: connections to each address

A worker announces what a coordinator has to know before it connects (``announcement``). Whoever browses sees each
worker on several interfaces (``workers`` makes one of its sightings), measures the way to each of its addresses
(``measuring``) and takes the best (``choosing``): Thunderbolt first, then the fastest.

Nobody is admitted for having been found. Announcements are not authenticated: anyone in the network can send any. So a
name in a layout is found by the worker's key (``naming``), which the layout or this machine's keyring holds; the
announced fingerprint only says where to try, and the encrypted link, which needs the key itself, decides. Everything
that was received is cut to a length and made printable before it is shown.

    announcement  what is announced, as the strings of a TXT record and back. Pure
    txt           TXT records: their bytes and bounds. Pure
    parsing       what avahi-browse and dns-sd print. Pure
    workers       sightings of one worker as one; entries of earlier runs left out. Pure
    choosing      which of several addresses. Pure
    naming        which worker a stage's name and key mean. Pure
    sentences     what a person reads. Pure
    means         by what is browsed and announced here: zeroconf, or the system's commands
    by_zeroconf, by_commands   the two
    overhearing   whether other devices answer at all, on each interface
    measuring     connections to the addresses
    announcer     a process beside the worker that announces it
    announcing    the worker's end of that process
    discover      all of it: what was found, and what was tried; the addresses of a layout's names

Sources: RFC 6762 (multicast DNS) and RFC 6763 (DNS-based service discovery).
"""
