"""Sets a thread's quality of service on macOS: its priority, and the kind of core that it runs on.

Threads between a request and its next token are work that "was initiated by the user and that the user is likely
waiting for": "user initiated". A thread of ``pthread_create`` is "default", which is lower; "user interactive" is for
event loops and animation. Writing KV to disk in the background is "utility": it may be throttled. (sys/qos.h and
pthread/qos.h of Apple's libpthread: ``pthread_set_qos_class_self_np`` returns 0, or EPERM if the thread has left the
system.) A class does not lift the limits that launchd sets on a process without ``ProcessType`` Interactive.
"""

import ctypes
import logging

from splitinfer.system import apple

log = logging.getLogger(__name__)


_USER_INITIATED, _UTILITY = 0x19, 0x11  # sys/qos.h


def serve_requests() -> None:
    """Raise the calling thread's class, because requests wait for it. Call it at the thread's beginning."""
    _become(_USER_INITIATED)


def write_behind() -> None:
    """Lower the calling thread's class, because nobody waits for it. Call it at the thread's beginning."""
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
