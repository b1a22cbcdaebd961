"""Shows the KV folder to a person: lists its content, removes KV, cleans up."""

import time
from dataclasses import dataclass
from pathlib import Path

from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.index import StoredFile, surplus
from splitinfer.kvstore.record import Damaged


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One group's files for one range of layers. ``used``: seconds since the last use of any of them."""

    group: str
    model: str
    arithmetic: str
    layers: tuple[int, int]
    num_blocks: int
    num_tokens: int
    nbytes: int
    used: float


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The numbers of removed files, and their bytes. ``orphans``: files without the blocks before them. ``unfinished``:
    half-written files. ``surplus``: files over the cap."""

    damaged: int
    orphans: int
    unfinished: int
    surplus: int
    nbytes: int


def look(path: Path) -> list[GroupFigures]:
    """List the folder's content, the last used first."""
    folder, now = Folder(path), time.time()
    found: list[GroupFigures] = []
    for group in folder.groups():
        about = folder.about(group)
        model = str(about.get("model", "unknown"))
        arithmetic = f"{about.get('dtype', '?')}, {about.get('device', '?')}"
        by_layers: dict[tuple[int, int], list[StoredFile]] = {}
        for file in folder.files(group):
            by_layers.setdefault(file.name.layers, []).append(file)
        found += [
            GroupFigures(
                group,
                model,
                arithmetic,
                layers,
                len(files),
                sum(file.name.end - file.name.start for file in files),
                sum(file.nbytes for file in files),
                max(0.0, now - max(file.used for file in files)),
            )
            for layers, files in by_layers.items()
        ]
    return sorted(found, key=lambda one: (one.used, one.layers))


def remove(path: Path, model: str | None) -> tuple[int, int]:
    """Remove the KV of one model, given by its name or a group's; ``None`` removes all KV. Return the number of files
    and bytes removed."""
    folder = Folder(path)
    files = nbytes = 0
    for group in folder.groups():
        if model is None or model in (group, folder.about(group).get("model")):
            gone = folder.files(group)
            files, nbytes = files + len(gone), nbytes + sum(file.nbytes for file in gone)
            folder.remove_group(group)
    return files, nbytes


def clean(path: Path, cap_bytes: int) -> Cleaned:
    """Read every file; remove unusable files, and the least recently used beyond ``cap_bytes``."""
    folder = Folder(path)
    damaged, orphans, nbytes = 0, 0, 0
    for group in folder.groups():
        for file in folder.files(group):
            if _is_damaged(folder, file):
                damaged, nbytes = damaged + 1, nbytes + file.nbytes
                folder.remove(group, file.name)
        for file in _orphans(folder.files(group)):
            orphans, nbytes = orphans + 1, nbytes + file.nbytes
            folder.remove(group, file.name)
    unfinished, left = folder.sweep(stale=60.0)
    over = surplus(folder.all_files(), cap_bytes)
    for file in over:
        folder.remove(file.group, file.name)
    return Cleaned(damaged, orphans, unfinished, len(over), nbytes + left + sum(file.nbytes for file in over))


def _is_damaged(folder: Folder, file: StoredFile) -> bool:
    try:
        folder.read(file.group, file.name)
    except Damaged:
        return True
    except OSError:  # removed meanwhile, or this user may not read it: perhaps not damaged
        return False
    return False


def _orphans(files: list[StoredFile]) -> list[StoredFile]:
    """Return the files of blocks whose predecessors have no file."""
    keys = {file.name.key for file in files if file.name.start == 0}
    orphans: list[StoredFile] = []
    for file in sorted(files, key=lambda file: file.name.start):
        if file.name.start == 0 or file.name.parent in keys:
            keys.add(file.name.key)
        else:
            orphans.append(file)
    return orphans
