"""Keeps this machine awake while it has work.

On macOS that is an assertion of type ``PreventUserIdleSystemSleep``: the display may sleep, the machine does not for
lack of a person. Nothing here can prevent the sleep that a person asks for, closing a lid, or an empty battery. Any
process may make one, without privileges, and one that ends takes its assertions with it (IOKit/pwr_mgt/IOPMLib.h:
IOPMAssertionCreateWithName, IOPMAssertionRelease; types of kIOPMAssertionLevelOn, 255, and of the id, both uint32_t).
A process that holds one is no candidate for App Nap either, which would slow its timers and its reading ("It hasn't
taken any IOKit power management or NSProcessInfo assertions": Energy Efficiency Guide for Mac Apps, Extend App Nap); so
no NSProcessInfo activity is needed.

Where IOKit cannot be reached, ``caffeinate -i -w PID`` (caffeinate(8)) holds the same assertion in a process of its own
until it is ended, or this one has.
"""

import contextlib
import ctypes
import logging
import os
import subprocess
from collections.abc import Callable, Iterator

from splitinfer.system import apple
from splitinfer.system.wakefulness import LINGER, Wakefulness

log = logging.getLogger(__name__)

VARIABLE = "SPLITINFER_STAY_AWAKE"  # "0": this process prevents no sleep

Release = Callable[[], None]

_TYPE = "PreventUserIdleSystemSleep"  # kIOPMAssertPreventUserIdleSystemSleep
_LEVEL_ON = 255
_UTF8 = 0x08000100  # kCFStringEncodingUTF8 (CFString.h)
_MAX_NAME = 128  # bytes (kMaxNameLength in IOKitUser's IOPMAssertions.c)
_CAFFEINATE = "/usr/bin/caffeinate"


class KeepAwake:
    """Prevents sleep while there is work, and ``linger`` seconds longer. For one thread.

    ``why``: for people, who see it in ``pmset -g assertions``. ``prevent``: begins to prevent sleep, and returns what
    ends that; it raises OSError where it cannot."""

    def __init__(self, why: str, prevent: Callable[[str], Release] | None = None, *, linger: float = LINGER) -> None:
        self._why, self._prevent = why, prevent or prevent_idle_sleep
        self._wakefulness = Wakefulness(linger)
        self._release: Release | None = None
        self._has_warned = False

    def update(self, is_busy: bool, now: float) -> None:
        """Say whether there is work now."""
        is_wanted = self._wakefulness.update(is_busy, now)
        if is_wanted and self._release is None:
            self._release = self._begin()
        elif not is_wanted:
            self.close()

    def until_update(self, now: float) -> float | None:
        """Seconds until ``update`` has to be called though nothing has happened; ``None``: it has not."""
        return self._wakefulness.until_release(now)

    def close(self) -> None:
        """Let the machine sleep."""
        release, self._release = self._release, None
        if release is not None:
            try:
                release()
            except OSError as error:
                self._warn(error)

    def _begin(self) -> Release:
        try:
            return self._prevent(self._why)
        except OSError as error:
            self._warn(error)
            return _nothing  # tried again the next time that work comes

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("this machine may go to sleep while it is needed: %s", error)


def _nothing() -> None:
    pass


def prevent_idle_sleep(why: str) -> Release:
    """Prevent this machine's idle sleep until what is returned is called. Does nothing except on macOS, or where
    ``SPLITINFER_STAY_AWAKE`` is 0.

    Raises:
        OSError: the system refuses.
    """
    if not apple.is_macos() or os.environ.get(VARIABLE) == "0":
        return _nothing
    try:
        return assert_by_iokit(why, apple.library(apple.IOKIT), apple.library(apple.CORE_FOUNDATION))
    except (OSError, AttributeError) as error:  # AttributeError: a library without the function
        log.info("no power assertion (%s); trying caffeinate", error)
        return assert_by_caffeinate()


def assert_by_iokit(why: str, iokit: ctypes.CDLL, core_foundation: ctypes.CDLL) -> Release:
    """Create a power assertion named ``why``; returns what releases it.

    Raises:
        OSError: the power daemon refuses.
        AttributeError: a library lacks one of the functions.
    """
    create, release = iokit.IOPMAssertionCreateWithName, iokit.IOPMAssertionRelease
    create.argtypes = (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32))
    create.restype = release.restype = ctypes.c_int
    release.argtypes = (ctypes.c_uint32,)
    number = ctypes.c_uint32(0)
    with _string(_TYPE, core_foundation) as kind, _string(why, core_foundation) as name:
        status = create(kind, _LEVEL_ON, name, ctypes.byref(number))
    if status != 0:
        raise OSError(f"IOPMAssertionCreateWithName returned {status & 0xFFFFFFFF:#x}")

    def end() -> None:
        if (status := release(number)) != 0:
            raise OSError(f"IOPMAssertionRelease returned {status & 0xFFFFFFFF:#x}")

    return end


@contextlib.contextmanager
def _string(text: str, core_foundation: ctypes.CDLL) -> Iterator[int]:
    """A CFString for the length of a ``with`` block: whatever wants it longer retains it."""
    make, free = core_foundation.CFStringCreateWithCString, core_foundation.CFRelease
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32), ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    made = make(None, text.encode()[:_MAX_NAME], _UTF8)
    if not made:
        raise OSError("CFStringCreateWithCString returned NULL")
    try:
        yield made
    finally:
        free(made)


def assert_by_caffeinate(command: str = _CAFFEINATE) -> Release:
    """Let ``caffeinate`` hold the assertion until what is returned is called, or this process has ended.

    Raises:
        OSError: it cannot be started.
    """
    child = subprocess.Popen(
        [command, "-i", "-w", str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        child.kill()  # SIGTERM would do; nothing in it has to be cleaned up
        child.wait()

    return end
