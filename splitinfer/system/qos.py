"""The quality of service of a thread, on macOS: with what priority it runs, and on which kind of core.

Threads between a request and its next token are work that "was initiated by the user and that the user is likely
waiting for": "user initiated". One that ``pthread_create`` makes is "default", which is below that; "user interactive"
is for event loops and animation. Writing KV to disk behind the computing is "utility": it may be throttled. (sys/qos.h
and pthread/qos.h of Apple's libpthread: ``pthread_set_qos_class_self_np`` returns 0, or EPERM where the thread has left
the system.) A class does not lift the limits of a process, as launchd sets them without ``ProcessType`` Interactive.
"""

import ctypes
import logging

from splitinfer.system import apple

log = logging.getLogger(__name__)


_USER_INITIATED, _UTILITY = 0x19, 0x11  # sys/qos.h


def serve_requests() -> None:
    """Call at the beginning of a thread that requests wait for."""
    _become(_USER_INITIATED)


def write_behind() -> None:
    """Call at the beginning of a thread that nobody waits for."""
    _become(_UTILITY)


def _become(qos: int) -> None:
    if not apple.is_macos():
        return
    try:
        call = apple.library(apple.LIBSYSTEM).pthread_set_qos_class_self_np
        call.argtypes, call.restype = (ctypes.c_uint, ctypes.c_int), ctypes.c_int
        status = call(qos, 0)
    except (OSError, AttributeError) as error:
        log.debug("a thread keeps its class: %s", error)
    else:
        if status != 0:
            log.debug("a thread keeps its class: pthread_set_qos_class_self_np returned %d", status)
