"""Reads how much memory is free, and how much of it the GPU may take.

On macOS ``vm_stat`` counts the pages, which takes milliseconds.

``iogpu.wired_limit_mb`` is the owner's limit of what the GPU may wire, in MiB; 0 leaves it to macOS, whose choice Metal
reports as ``recommendedMaxWorkingSetSize``: "an approximation of how much memory, in bytes, this GPU device can
allocate without affecting its runtime performance" (MTLDevice). It is the device's, not a process's. It follows the
owner's limit (seen in both directions: AlexsJones/llmfit #754; 11.8 of 16 GiB and 107.5 of 128 GiB without one: the
same, and antirez/ds4 #893). MLX asks for it once, which is *assumed* of all its versions; so a limit that was changed
later is not in what MLX reports, and the smaller of both holds.
"""

import logging

import psutil

from splitinfer.system import apple
from splitinfer.system.command import run
from splitinfer.system.memory_pages import MemoryPages, parse_vm_stat

log = logging.getLogger(__name__)

_VM_STAT = "/usr/bin/vm_stat"
_SECONDS = 5.0


def available_bytes() -> int:
    """Bytes of this machine's memory that can be had without taking them from a program that uses them."""
    pages = memory_pages()
    return int(psutil.virtual_memory().available) if pages is None else pages.available_bytes


def memory_pages() -> MemoryPages | None:
    """What macOS counts; ``None`` on other systems, or where ``vm_stat`` does not tell it."""
    if not apple.is_macos():
        return None
    done = run([_VM_STAT], _SECONDS)
    try:
        return parse_vm_stat(done.output)
    except ValueError as error:
        log.info("vm_stat does not tell the free memory: %s", done.complaint or error)
    return None


def wired_limit_bytes() -> int | None:
    """The owner's limit of what the GPU may wire; ``None`` where it is macOS's own, or there is none."""
    if not apple.is_macos():
        return None
    try:
        value = apple.sysctl("iogpu.wired_limit_mb")
    except (OSError, AttributeError) as error:
        log.debug("no wired limit: %s", error)
        return None
    limit = int.from_bytes(value, "little", signed=True)  # every Mac is little-endian
    return limit * 2**20 if limit > 0 else None
