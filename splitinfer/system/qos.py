"""The quality of service of a thread, on macOS.

The class decides with what priority a thread runs, on which kind of core, and how late its timers may fire. A thread
made by ``pthread_create`` is of class "default": "below critical user-interactive and user-initiated work". The threads
between a request and its next token are work that "was initiated by the user and that the user is likely waiting for",
which is "user initiated". "User interactive" is for "critical interaction with the user such as handling events on the
main event loop, view drawing, animation": a stage that computes for minutes does not qualify. Writing KV to disk
behind the computing is "utility": it may be throttled. (sys/qos.h of Apple's libpthread: the classes, their values
and these words; pthread/qos.h: ``int pthread_set_qos_class_self_np(qos_class_t, int relative_priority)``, which returns
0, or EPERM where the thread has left the system, by ``pthread_setschedparam`` for example.)

A class does not lift the limits of a process: one that launchd starts without ``ProcessType`` Interactive has its CPU
usage and I/O throttled lightly whatever its threads are (launchd.plist(5)), and one that ``taskpolicy -b`` put into the
background stays there. Threads that ZeroMQ and Metal make for themselves are not reached.
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
