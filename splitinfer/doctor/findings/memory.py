"""Memory as macOS counts it: swap files, what programs use, what the GPU may wire.

Activity Monitor's *Memory Used* is the memory of programs, wired memory and what the compressor holds
(``system.memory_pages``). Weights that were swapped out come back from the disk at every token.
``iogpu.wired_limit_mb`` raises what the GPU may hold; that macOS needs 2 GiB besides is *assumed*.
"""

from collections.abc import Iterator

from splitinfer.doctor.findings.finding import Finding, Seen, Severity
from splitinfer.doctor.parsing.macos import swap_used, wired_limit
from splitinfer.models.memory import size
from splitinfer.system.memory_pages import MemoryPages, parse_vm_stat

AREA = "memory"
_MUCH_SWAP = 2**30
_FOR_MACOS = 2 * 2**30
_LITTLE = 0.1  # of the memory, still available
_MUCH_WIRED = 0.5
_QUIT = (
    "quit programs that you do not need (Activity Monitor, Memory, sorted by size), or give this machine fewer layers"
)


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on this machine's memory."""
    yield from _limit(seen)
    swapped = seen.read("swap", swap_used) or 0
    if swapped > _MUCH_SWAP:
        text = f"{size(swapped)} are in swap files: a stage whose weights are there waits for the disk at each token"
        yield Finding(AREA, Severity.WARNING, text, _QUIT)
    pages = seen.read("memory", parse_pages)
    if pages is not None:
        yield from _use(seen, pages)
    elif not seen.is_mac and seen.memory and seen.available < _LITTLE * seen.memory:
        text = f"only {size(seen.available)} of {size(seen.memory)} are available"
        yield Finding(AREA, Severity.WARNING, text, "end programs that you do not need, or give it fewer layers")


def parse_pages(text: str) -> MemoryPages | None:
    """The pages that ``vm_stat`` counts; ``None``: it is some other text."""
    try:
        return parse_vm_stat(text)
    except ValueError:
        return None


def _limit(seen: Seen) -> Iterator[Finding]:
    megabytes = seen.read("wired_limit", wired_limit) or 0
    if seen.memory and megabytes * 2**20 > seen.memory - _FOR_MACOS:
        text = f"iogpu.wired_limit_mb is {megabytes}, which leaves macOS less than 2 GiB of {size(seen.memory)}"
        yield Finding(AREA, Severity.WARNING, text, f"sudo sysctl iogpu.wired_limit_mb={good_limit(seen.memory)}")


def good_limit(memory: int) -> int:
    """Megabytes that the GPU of a Mac may wire where nothing else is to run: 85 % of its memory, in bytes."""
    return memory * 85 // 100 // 2**20


def _use(seen: Seen, pages: MemoryPages) -> Iterator[Finding]:
    kinds = pages.by_category()
    if seen.memory and pages.available_bytes < _LITTLE * seen.memory:
        used = ", ".join(f"{name} {size(kinds[name])}" for name in ("app memory", "wired", "compressed"))
        text = f"only {size(pages.available_bytes)} of {size(seen.memory)} are available ({used})"
        yield Finding(AREA, Severity.WARNING, text, _QUIT)
    if seen.memory and kinds["wired"] > _MUCH_WIRED * seen.memory and not seen.processes:
        text = (
            f"{size(kinds['wired'])} are wired, and no splitinfer runs: another program computes on the GPU, or an "
            "RDMA process was killed, whose memory comes back with a restart"
        )
        yield Finding(AREA, Severity.NOTE, text, "end such programs; if there are none: sudo shutdown -r now")
