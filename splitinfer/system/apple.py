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


def command_buffers(chip: str) -> dict[str, str]:
    """The variables with which MLX cuts work for a chip's GPU into command buffers.

    By default it cuts after some 40 operations, and holds a launch once ten buffers are under way. With longer ones a
    chunk of a prompt could take a slow GPU more than a second for each, which macOS takes for a hang.

    >>> command_buffers("Apple M4 Max")["MLX_MAX_MB_PER_BUFFER"], command_buffers("Apple M1")["MLX_MAX_MB_PER_BUFFER"]
    ('400', '100')
    """
    is_large = any(word in chip.split() for word in ("Max", "Ultra"))
    return {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "400" if is_large else "100"}


def chip() -> str:
    """This Mac's chip, such as "Apple M4 Max"; empty where it cannot be told."""
    name, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    try:
        failed = library(LIBSYSTEM).sysctlbyname(b"machdep.cpu.brand_string", name, ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return ""
    return "" if failed else name.value.decode(errors="replace")


@cache
def library(path: str) -> ctypes.CDLL:
    """A library of macOS.

    Raises:
        OSError: it cannot be loaded.
    """
    return ctypes.CDLL(path)
