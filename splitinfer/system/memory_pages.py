"""The kinds of pages that macOS counts, and how many bytes of them a stage may take. Pure.

    all pages = free + file-backed + anonymous + wired + occupied by the compressor
                       │             └ of these *purgeable*: their owners can do without them
                       └ of these *speculative*: read ahead; the kernel's count of free pages has them, too
                         (vm_page_speculate in osfmk/vm/vm_resident.c; mach/vm_statistics.h)

Activity Monitor counts as *Memory Used* anonymous pages that are not purgeable (App Memory), wired ones and those of
the compressor, and shows file-backed and purgeable ones as *Cached Files* (Apple, "View information about Mac memory
use in Activity Monitor"). What it does not count as used can be had at once, without writing anything: free pages and
cached files. iOS, which must not swap, grants exactly that to its applications (xnu, osfmk/vm/vm_page.h: with
CONFIG_JETSAM ``VM_CHECK_MEMORYSTATUS`` adds pageable external, free and purgeable pages).

psutil's ``available`` is inactive plus free pages. That leaves out file-backed pages that were read lately, such as
those of the model that was just loaded, and it counts idle anonymous pages in full, which have to be compressed first.
Those are counted here as half: compression reduces them "by more than 50 percent" (Apple, OS X Mavericks Core
Technologies Overview, "Compressed Memory"). macOS does not say how many inactive pages are anonymous. At least those
are that can be neither file-backed nor purgeable, so these are taken.

``kern.memorystatus_level``, which ``memory_pressure`` prints as "free percentage", is no budget: it has all active
pages in it, the working sets of other programs (AVAILABLE_NON_COMPRESSED_MEMORY in the same file).
"""

import re
from dataclasses import dataclass

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
        """Bytes, by the names of Activity Monitor; "compressible" is what compressing idle pages would free."""
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
    """The pages, from the output of ``vm_stat``.

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
