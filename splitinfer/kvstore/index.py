"""Parses the names of block files, and chooses the files to evict. Pure.

A file holds one block's KV for a range of layers, and its name has everything that planning needs:

    key - parent's key - first position - one past the last - first layer - one past the last .kv

A stage reads only files of exactly its layers. A block is used only if every stage has it, and after another cut at
least one machine has layers that it did not have: files of other layers would not help.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitinfer.core.kv.block_tree import Key

SUFFIX = ".kv"
_NUMBER = r"(0|[1-9][0-9]{0,8})"  # no leading zeros, so that a parsed name is written identically
_NAME = re.compile(rf"([0-9a-f]{{32}})-([0-9a-f]{{32}})-{_NUMBER}-{_NUMBER}-{_NUMBER}-{_NUMBER}\.kv")


@dataclass(frozen=True, slots=True)
class FileName:
    """Positions [start, end) in layers [first, last) of the block ``key`` after ``parent``."""

    key: Key
    parent: Key
    start: int
    end: int
    first: int
    last: int

    @property
    def layers(self) -> tuple[int, int]:
        """The layers, half-open."""
        return self.first, self.last

    def __str__(self) -> str:
        return f"{self.key.hex()}-{self.parent.hex()}-{self.start}-{self.end}-{self.first}-{self.last}{SUFFIX}"


def parse(name: str) -> FileName | None:
    """Parse a file's name. Return None if it is not the name of a block.

    >>> name = FileName(b"k" * 16, b"p" * 16, 256, 300, 0, 8)
    >>> parse(str(name)) == name, parse("notes.txt")
    (True, None)
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    start, end, first, last = (int(match[i]) for i in (3, 4, 5, 6))
    if start >= end or first >= last:
        return None
    return FileName(bytes.fromhex(match[1]), bytes.fromhex(match[2]), start, end, first, last)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the folder of ``group``: ``nbytes`` long, last used at ``used``, in seconds since the epoch."""

    group: str
    name: FileName
    nbytes: int
    used: float


def lineage(files: Iterable[StoredFile], group: str, key: Key) -> set[StoredFile]:
    """Return the files of a block and of all blocks before it."""
    of_key: dict[Key, list[StoredFile]] = defaultdict(list)
    for file in files:
        if file.group == group:
            of_key[file.name.key].append(file)
    found: set[StoredFile] = set()
    while own := of_key.pop(key, None):
        found.update(own)
        key = own[0].name.parent
    return found


def surplus(files: Sequence[StoredFile], cap: int) -> list[StoredFile]:
    """Return the files to evict so that the rest is at most ``cap`` bytes, in the order of eviction.

    The least recently used go first. Use of a block counts as use of all blocks before it, because it needs them; among
    equally old blocks the later positions go first.
    """
    over = sum(file.nbytes for file in files) - cap
    if over <= 0:
        return []
    used = _last_uses(files)
    evicted: list[StoredFile] = []
    for file in sorted(files, key=lambda file: (used[file.group, file.name.key], -file.name.start)):
        if over <= 0:
            break
        evicted.append(file)
        over -= file.nbytes
    return evicted


def _last_uses(files: Iterable[StoredFile]) -> dict[tuple[str, Key], float]:
    """Return the time of the last use of each block or of a block after it."""
    used: dict[tuple[str, Key], float] = defaultdict(float)
    for file in sorted(files, key=lambda file: -file.name.start):
        own = used[file.group, file.name.key] = max(used[file.group, file.name.key], file.used)
        before = (file.group, file.name.parent)
        used[before] = max(used[before], own)
    return used
