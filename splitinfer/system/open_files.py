"""Raises the number of files that this process may open. A connection counts as a file.

A process starts with a soft limit, which it may raise up to a hard one (getrlimit(2)). macOS gives 256
(`launchctl limit maxfiles`), many Linux systems 1,024. On macOS the hard limit is often "unlimited", which setrlimit(2)
does not take there: at most OPEN_MAX, 10,240 (its section COMPATIBILITY; sys/syslimits.h).
"""

import logging
import resource

from splitinfer.system import apple

log = logging.getLogger(__name__)

_OPEN_MAX = 10_240


def raised(soft: int, hard: int, wanted: int, *, on_macos: bool) -> int:
    """Return the soft limit to set for ``wanted`` open files, within the bounds. A negative limit is infinite.

    >>> raised(256, -1, 5000, on_macos=True), raised(256, -1, 50_000, on_macos=True)
    (5000, 10240)
    >>> raised(1024, 4096, 5000, on_macos=False), raised(20_000, 20_000, 5000, on_macos=False)
    (4096, 20000)
    """
    if soft < 0 or soft >= wanted:
        return soft
    bounds = [wanted, *([hard] if hard >= 0 else []), *([_OPEN_MAX] if on_macos else [])]
    return max(soft, min(bounds))


def make_room(wanted: int) -> int:
    """Raise the limit so that ``wanted`` files may be open. Return the number allowed then, at most ``wanted``."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (-1 if value == resource.RLIM_INFINITY else value for value in limits)
    limit = raised(soft, hard, wanted, on_macos=apple.is_macos())
    if limit != soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        except (OSError, ValueError) as error:
            log.debug("the limit of open files stays at %d: %s", soft, error)
            limit = soft
    return wanted if limit < 0 else min(wanted, limit)
