"""macOS's system library. Its file is not on the disk since macOS 11: dlopen finds it in the cache of the dynamic
linker (macOS Big Sur 11.0.1 Release Notes, 62986286).
"""

import ctypes
import platform
from functools import cache

LIBSYSTEM = "/usr/lib/libSystem.B.dylib"


def is_macos() -> bool:
    """Return whether this process runs on macOS."""
    return platform.system() == "Darwin"


def command_buffers(chip: str) -> dict[str, str]:
    """Return the environment variables that set how MLX cuts the work for a chip's GPU into command buffers.

    By default MLX cuts after some 40 operations, and delays a launch once ten buffers are under way. With longer ones
    than these, a slow GPU could need more than a second for one, which macOS treats as a hang.

    >>> command_buffers("Apple M4 Max")["MLX_MAX_MB_PER_BUFFER"], command_buffers("Apple M1")["MLX_MAX_MB_PER_BUFFER"]
    ('400', '100')
    """
    is_large = any(word in chip.split() for word in ("Max", "Ultra"))
    return {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "400" if is_large else "100"}


def chip() -> str:
    """Return this Mac's chip, such as "Apple M4 Max", or an empty text if it is unknown."""
    try:
        return sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    except (OSError, AttributeError):
        return ""


def sysctl(name: str) -> bytes:
    """Return a value of ``sysctl``, of at most 128 bytes (sysctlbyname(3)).

    Raises:
        OSError: no value has that name.
        AttributeError: the library lacks the function.
    """
    call = library(LIBSYSTEM).sysctlbyname
    size = ctypes.POINTER(ctypes.c_size_t)
    call.argtypes = (ctypes.c_char_p, ctypes.c_void_p, size, ctypes.c_void_p, ctypes.c_size_t)
    call.restype = ctypes.c_int
    value, length = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    if call(name.encode(), value, ctypes.byref(length), None, 0) != 0:
        raise OSError(f"sysctl has no {name}")
    return value.raw[: length.value]


@cache
def library(path: str) -> ctypes.CDLL:
    """Return a library of macOS.

    Raises:
        OSError: it cannot be loaded.
    """
    return ctypes.CDLL(path)
