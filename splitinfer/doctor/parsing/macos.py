"""macOS's version and memory: ``sw_vers``, ``sysctl iogpu.wired_limit_mb`` and ``sysctl vm.swapusage``."""

import re

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def version(text: str) -> tuple[int, ...] | None:
    """The first version number in the output of ``sw_vers``.

    >>> version("26.2.1"), version("ProductVersion:  15.7"), version("none")
    ((26, 2, 1), (15, 7), None)
    """
    found = re.search(r"\b\d{1,4}(?:\.\d{1,4}){1,3}\b", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


def wired_limit(text: str) -> int | None:
    """Megabytes that the GPU may wire, from ``sysctl iogpu.wired_limit_mb``; 0 leaves it to macOS."""
    found = re.search(r"\b(\d{1,12})\s*$", text.strip())
    return int(found[1]) if found else None


def swap_used(text: str) -> int | None:
    """Bytes of swap files in use, from ``sysctl vm.swapusage``; some locales print a decimal comma.

    >>> swap_used("vm.swapusage: total = 2048.00M  used = 512,50M  free = 1535.50M  (encrypted)")
    537395200
    """
    found = re.search(r"\bused = (\d{1,9}(?:[.,]\d{1,4})?)([KMGT])", text)
    return int(float(found[1].replace(",", ".")) * _UNITS[found[2]]) if found else None
