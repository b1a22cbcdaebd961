"""Reads how much memory is free, and how much of it the GPU may take; gives back what this process has freed.

On macOS ``vm_stat`` counts the pages, which takes milliseconds:

    all pages = free + file-backed + anonymous + wired + occupied by the compressor
                       │             └ of these *purgeable*: their owners can do without them
                       └ of these *speculative*: read ahead; the kernel's count of free pages has them, too
                         (vm_page_speculate in osfmk/vm/vm_resident.c; mach/vm_statistics.h)

Free pages and cached files are available at once; iOS, too, grants them to its applications (xnu, osfmk/vm/vm_page.h).
psutil's ``available`` leaves out file-backed pages that were read lately, such as those of a model just loaded, and
counts idle anonymous pages in full. Here these count half, as compression reduces them "by more than 50 percent"
(Apple, OS X Mavericks Core Technologies Overview).

``iogpu.wired_limit_mb`` is the owner's limit of the memory that the GPU may wire, in MiB; 0 leaves it to macOS. Metal
reports the limit of the device as ``recommendedMaxWorkingSetSize``. It follows the owner's limit (AlexsJones/llmfit
#754, antirez/ds4 #893), but MLX asks for it once (*assumed* of all its versions): the smaller of both holds.
"""

import ctypes
import logging
import re
from dataclasses import dataclass

import psutil

from splitinfer.system import apple
from splitinfer.system.command import run

# -- the kinds of pages that macOS counts ------------------------------------------------------------------------------

_COMPRESSED_SHARE = 0.5  # the most that remains of a compressed page

# vm_stat's names, from the source of vm_stat.c (system_cmds), and ours. Its "Pages free" leaves out speculative ones.
_NAMES = {
    "Pages free": "free",
    "Pages inactive": "inactive",
    "Pages speculative": "speculative",
    "Pages wired down": "wired",
    "Pages purgeable": "purgeable",
    "File-backed pages": "file_backed",
    "Anonymous pages": "anonymous",
    "Pages occupied by compressor": "compressor",
}


@dataclass(frozen=True, slots=True)
class MemoryPages:
    """Numbers of pages of ``page_size`` bytes. ``free`` leaves out ``speculative``, which are among ``file_backed``."""

    page_size: int
    free: int
    inactive: int
    speculative: int
    wired: int
    purgeable: int
    file_backed: int
    anonymous: int
    compressor: int

    @property
    def idle_anonymous(self) -> int:
        """The least number of pages that are inactive and neither file-backed nor purgeable."""
        return max(0, self.inactive - max(0, self.file_backed - self.speculative) - self.purgeable)

    @property
    def available_bytes(self) -> int:
        """The bytes that are available without taking memory from a program that uses it."""
        compressible = int(self.idle_anonymous * (1 - _COMPRESSED_SHARE))
        return (self.free + self.file_backed + self.purgeable + compressible) * self.page_size

    def by_category(self) -> dict[str, int]:
        """Return the bytes by the names of Activity Monitor; "compressible": bytes that compressing idle pages would
        free."""
        pages = {
            "free": self.free,
            "cached files": self.file_backed + self.purgeable,
            "app memory": max(0, self.anonymous - self.purgeable),
            "wired": self.wired,
            "compressed": self.compressor,
            "compressible": int(self.idle_anonymous * (1 - _COMPRESSED_SHARE)),
        }
        return {name: count * self.page_size for name, count in pages.items()}


def parse_vm_stat(text: str) -> MemoryPages:
    """Return the pages, from the output of ``vm_stat``.

    Raises:
        ValueError: it is not the output of ``vm_stat``, or lacks a kind of page.
    """
    head = re.match(r"Mach Virtual Memory Statistics: \(page size of (\d+) bytes\)", text)
    if head is None:
        raise ValueError("this is not the output of vm_stat")
    found = {name.strip('"'): int(count) for name, count in re.findall(r"^(.+?):\s+(\d+)\.?$", text, re.MULTILINE)}
    missing = next((name for name in _NAMES if name not in found), None)
    if missing is not None:
        raise ValueError(f"vm_stat did not print {missing!r}")
    return MemoryPages(page_size=int(head[1]), **{ours: found[theirs] for theirs, ours in _NAMES.items()})


# -- what is free ------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_VM_STAT = "/usr/bin/vm_stat"
_SECONDS = 5.0


def available_bytes() -> int:
    """Return the bytes of memory that are available without taking them from a program that uses them."""
    pages = memory_pages()
    return int(psutil.virtual_memory().available) if pages is None else pages.available_bytes


def memory_pages() -> MemoryPages | None:
    """Return the pages that macOS counts. Return None on other systems, or if ``vm_stat`` fails."""
    if not apple.is_macos():
        return None
    done = run([_VM_STAT], _SECONDS)
    try:
        return parse_vm_stat(done.output)
    except ValueError as error:
        log.info("vm_stat did not report the free memory: %s", done.complaint or error)
    return None


def wired_limit_bytes() -> int | None:
    """Return the owner's limit of the bytes that the GPU may wire. Return None if the owner has set no limit."""
    if not apple.is_macos():
        return None
    try:
        value = apple.sysctl("iogpu.wired_limit_mb")
    except (OSError, AttributeError) as error:
        log.debug("no wired limit: %s", error)
        return None
    limit = int.from_bytes(value, "little", signed=True)  # every Mac is little-endian
    return limit * 2**20 if limit > 0 else None


# -- memory that this process has freed --------------------------------------------------------------------------------


def release_freed() -> None:
    """Give memory that this process has freed back to the system, where the C library keeps it and has a call for that:
    glibc's ``malloc_trim``. macOS asks for it when memory is short."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
