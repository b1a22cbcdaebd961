"""Which parts of the store rest on the word of one machine, and of which.

    part-x.safetensors.from    who sent some of it, one a line: a key, or an address where links are not encrypted

Checksums, and digests too, come with the bytes from whoever sends them, so they show nothing about a sender that lies,
or whose own copy is damaged. What is right is what the coordinator has that orders the load: what it sends is not noted
here. What anybody else sends is noted before its first byte is written, and stays noted until another machine than the
senders has told the same digests: the coordinator, as soon as it has these tensors, or else another worker. What a
coordinator has otherwise is dropped. Who copies from one machine alone has that machine's word, until then.
"""

import contextlib
import os
import re
from pathlib import Path

from splitinfer.store.part import CHECKS, said, sync_folder

_FROM = ".from"
_NOTE = re.compile(r"(part-[0-9a-f]{20}\.safetensors)\.from")
_MAX_NOTE = 2**16  # bytes


def note(folder: Path, part: str, sender: str) -> None:
    """Note that ``sender`` sends some of a part, before it does.

    Raises:
        ModelError: that cannot be written.
    """
    if sender in senders(folder, part):
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with said(folder):
        file = os.open(folder / f"{part}{_FROM}", flags, 0o600)
        try:
            os.write(file, f"{sender}\n".encode())
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(folder)


def senders(folder: Path, part: str) -> frozenset[str]:
    """Who is noted to have sent some of a part."""
    with contextlib.suppress(OSError):
        file = os.open(folder / f"{part}{_FROM}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return frozenset(os.read(file, _MAX_NOTE).decode("utf-8", "replace").splitlines())
        finally:
            os.close(file)
    return frozenset()


def noted(folder: Path) -> dict[Path, frozenset[str]]:
    """The complete parts that rest on somebody's word, and on whose."""
    found = (_NOTE.fullmatch(path.name) for path in sorted(folder.glob(f"part-*{_FROM}")))
    parts = (folder / match[1] for match in found if match is not None)
    return {path: senders(folder, path.name) for path in parts if path.exists()}


def confirm(path: Path) -> None:
    """Another machine has the same bytes: this part rests on no single word any more."""
    path.with_name(path.name + _FROM).unlink(missing_ok=True)


def drop(path: Path) -> None:
    """Remove a part whose bytes are not what another machine has. The part goes first: without its note it would count
    as confirmed."""
    with said(path.parent):
        for suffix in ("", CHECKS, _FROM):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
            sync_folder(path.parent)
