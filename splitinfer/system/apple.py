"""Where macOS keeps what is used here. The files named are not on the disk since macOS 11: dlopen finds them in the
cache of the dynamic linker (macOS Big Sur 11.0.1 Release Notes, 62986286).
"""

import ctypes
import platform
from functools import cache

LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
IOKIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
CORE_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"


def is_macos() -> bool:
    """Whether this process runs on macOS."""
    return platform.system() == "Darwin"


@cache
def library(path: str) -> ctypes.CDLL:
    """A library of macOS.

    Raises:
        OSError: it cannot be loaded.
    """
    return ctypes.CDLL(path)
