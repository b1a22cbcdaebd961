"""Reads how much memory is free, and how much of it the GPU may take.

On macOS ``vm_stat`` counts the pages, which takes milliseconds:

    all pages = free + file-backed + anonymous + wired + occupied by the compressor
                       │             └ of these *purgeable*: their owners can do without them
                       └ of these *speculative*: read ahead; the kernel's count of free pages has them, too
                         (vm_page_speculate in osfmk/vm/vm_resident.c; mach/vm_statistics.h)

Free pages and cached files can be had at once, as iOS grants them to its applications (xnu, osfmk/vm/vm_page.h).
psutil's ``available`` leaves out file-backed pages that were read lately, such as those of the model that was just
loaded, and counts idle anonymous ones in full; here these count half, as compression reduces them "by more than 50
percent" (Apple, OS X Mavericks Core Technologies Overview).

``iogpu.wired_limit_mb`` is the owner's limit of what the GPU may wire, in MiB; 0 leaves it to macOS, whose choice Metal
reports as ``recommendedMaxWorkingSetSize``. That is the device's and follows the owner's limit (AlexsJones/llmfit #754,
antirez/ds4 #893), but MLX asks for it once (*assumed* of all its versions): the smaller of both holds.
"""

import logging
import re
from dataclasses import dataclass

import psutil

from splitinfer.system import apple
from splitinfer.system.command import run

# -- the kinds of pages that macOS counts ------------------------------------------------------------------------------

_COMPRESSED_SHARE = 0.5  # what is left of a page that was compressed, at most

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
        """At least so many pages are inactive, and neither file-backed nor purgeable."""
        return max(0, self.inactive - max(0, self.file_backed - self.speculative) - self.purgeable)

    @property
    def available_bytes(self) -> int:
        """Bytes that can be had without taking memory from a program that uses it."""
        compressible = int(self.idle_anonymous * (1 - _COMPRESSED_SHARE))
        return (self.free + self.file_backed + self.purgeable + compressible) * self.page_size

    def by_category(self) -> dict[str, int]:
        """Return the bytes, by the names of Activity Monitor; "compressible" is what compressing idle pages would
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
        ValueError: it is not such an output, or lacks a kind of page.
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
    """Return the bytes of this machine's memory that can be had without taking them from a program that uses them."""
    pages = memory_pages()
    return int(psutil.virtual_memory().available) if pages is None else pages.available_bytes


def memory_pages() -> MemoryPages | None:
    """Return what macOS counts; ``None`` on other systems, or where ``vm_stat`` does not tell it."""
    if not apple.is_macos():
        return None
    done = run([_VM_STAT], _SECONDS)
    try:
        return parse_vm_stat(done.output)
    except ValueError as error:
        log.info("vm_stat does not tell the free memory: %s", done.complaint or error)
    return None


def wired_limit_bytes() -> int | None:
    """Return the owner's limit of what the GPU may wire. Return None if it is macOS's own, or there is none."""
    if not apple.is_macos():
        return None
    try:
        value = apple.sysctl("iogpu.wired_limit_mb")
    except (OSError, AttributeError) as error:
        log.debug("no wired limit: %s", error)
        return None
    limit = int.from_bytes(value, "little", signed=True)  # every Mac is little-endian
    return limit * 2**20 if limit > 0 else None
