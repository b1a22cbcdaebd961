"""Reads how much memory is free, and how much of it the GPU may take.

On macOS the kernel is asked by ``host_statistics64`` (flavor HOST_VM_INFO64, 4, in mach/host_info.h; the layout is that
of ``struct vm_statistics64`` in mach/vm_statistics.h, 152 bytes since OS X 10.9), which takes no process; where that
fails, ``vm_stat`` is run. Newer kernels append fields, and fill as many as the caller says it has room for.

``iogpu.wired_limit_mb`` is the owner's limit of what the GPU may wire, in MiB; 0 leaves it to macOS, whose choice Metal
reports as ``recommendedMaxWorkingSetSize``: "an approximation of how much memory, in bytes, this GPU device can
allocate without affecting its runtime performance" (MTLDevice). It is the device's, not a process's. It follows the
owner's limit (seen in both directions: AlexsJones/llmfit #754; 11.8 of 16 GiB and 107.5 of 128 GiB without one: the
same, and antirez/ds4 #893). MLX asks for it once, which is *assumed* of all its versions; so a limit that was changed
later is not in what MLX reports, and the smaller of both holds.
"""

import ctypes
import logging
import subprocess

import psutil

from splitinfer.system import apple
from splitinfer.system.memory_pages import MemoryPages, parse_vm_stat

log = logging.getLogger(__name__)

_HOST_VM_INFO64 = 4
_VM_STAT = "/usr/bin/vm_stat"
_SECONDS = 5.0  # for vm_stat, which takes milliseconds


class VmStatistics64(ctypes.Structure):
    """``struct vm_statistics64``: natural_t is 32 bits wide."""

    _fields_ = (
        ("free_count", ctypes.c_uint32),
        ("active_count", ctypes.c_uint32),
        ("inactive_count", ctypes.c_uint32),
        ("wire_count", ctypes.c_uint32),
        ("zero_fill_count", ctypes.c_uint64),
        ("reactivations", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("pageouts", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("cow_faults", ctypes.c_uint64),
        ("lookups", ctypes.c_uint64),
        ("hits", ctypes.c_uint64),
        ("purges", ctypes.c_uint64),
        ("purgeable_count", ctypes.c_uint32),
        ("speculative_count", ctypes.c_uint32),
        ("decompressions", ctypes.c_uint64),
        ("compressions", ctypes.c_uint64),
        ("swapins", ctypes.c_uint64),
        ("swapouts", ctypes.c_uint64),
        ("compressor_page_count", ctypes.c_uint32),
        ("throttled_count", ctypes.c_uint32),
        ("external_page_count", ctypes.c_uint32),
        ("internal_page_count", ctypes.c_uint32),
        ("total_uncompressed_pages_in_compressor", ctypes.c_uint64),
    )

    def pages(self, page_size: int) -> MemoryPages:
        """The counts by our names. The kernel's free pages have the speculative ones in them."""
        return MemoryPages(
            page_size=page_size,
            free=max(0, self.free_count - self.speculative_count),
            active=self.active_count,
            inactive=self.inactive_count,
            speculative=self.speculative_count,
            wired=self.wire_count,
            purgeable=self.purgeable_count,
            file_backed=self.external_page_count,
            anonymous=self.internal_page_count,
            compressor=self.compressor_page_count,
        )


def available_bytes() -> int:
    """Bytes of this machine's memory that can be had without taking them from a program that uses them."""
    pages = memory_pages()
    return int(psutil.virtual_memory().available) if pages is None else pages.available_bytes


def memory_pages() -> MemoryPages | None:
    """What macOS counts; ``None`` on other systems, or where it cannot be read."""
    if not apple.is_macos():
        return None
    try:
        return ask_kernel(apple.library(apple.LIBSYSTEM))
    except (OSError, AttributeError) as error:
        log.info("the kernel's counts of pages cannot be read (%s); running vm_stat", error)
    try:
        return run_vm_stat()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.info("vm_stat does not tell them either: %s", error)
    return None


def ask_kernel(libsystem: ctypes.CDLL) -> MemoryPages:
    """The counts of pages, from the kernel.

    Raises:
        OSError: it refuses.
        AttributeError: the library lacks a function.
    """
    host_self, statistics, size_of = libsystem.mach_host_self, libsystem.host_statistics64, libsystem.host_page_size
    host_self.argtypes, host_self.restype = (), ctypes.c_uint
    statistics.argtypes = (ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint))
    size_of.argtypes = (ctypes.c_uint, ctypes.POINTER(ctypes.c_size_t))
    statistics.restype = size_of.restype = ctypes.c_int
    host, counts, page = host_self(), VmStatistics64(), ctypes.c_size_t()
    room = ctypes.c_uint(ctypes.sizeof(counts) // ctypes.sizeof(ctypes.c_int))
    for name, status in (
        ("host_statistics64", statistics(host, _HOST_VM_INFO64, ctypes.byref(counts), ctypes.byref(room))),
        ("host_page_size", size_of(host, ctypes.byref(page))),
    ):
        if status != 0:
            raise OSError(f"{name} returned {status}")
    return counts.pages(page.value)


def run_vm_stat(command: str = _VM_STAT) -> MemoryPages:
    """The counts of pages, from ``vm_stat``.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be run.
        ValueError: it prints something else.
    """
    done = subprocess.run([command], capture_output=True, text=True, check=True, timeout=_SECONDS)
    return parse_vm_stat(done.stdout)


def wired_limit_bytes() -> int | None:
    """The owner's limit of what the GPU may wire; ``None`` where it is macOS's own, or there is none."""
    if not apple.is_macos():
        return None
    try:
        limit = read_sysctl("iogpu.wired_limit_mb", apple.library(apple.LIBSYSTEM))
    except (OSError, AttributeError) as error:
        log.debug("no wired limit: %s", error)
        return None
    return limit * 2**20 if limit > 0 else None


def read_sysctl(name: str, libsystem: ctypes.CDLL) -> int:
    """An integer of ``sysctl``, of 4 or 8 bytes (sysctlbyname(3)).

    Raises:
        OSError: there is none of that name.
        AttributeError: the library lacks the function.
    """
    call = libsystem.sysctlbyname
    size = ctypes.POINTER(ctypes.c_size_t)
    call.argtypes = (ctypes.c_char_p, ctypes.c_void_p, size, ctypes.c_void_p, ctypes.c_size_t)
    call.restype = ctypes.c_int
    value, length = (ctypes.c_ubyte * 8)(), ctypes.c_size_t(8)
    if call(name.encode(), ctypes.byref(value), ctypes.byref(length), None, 0) != 0:
        raise OSError(f"sysctl has no {name}")
    return int.from_bytes(bytes(value)[: length.value], "little", signed=True)  # every Mac is little-endian
