"""Keeps a registry of child processes and temporary folders until they are gone.

A process that unwinds its stack ends its children and removes its folders where it made them. A process that must end
at once cannot unwind: the command line calls ``clear`` and exits. So this module makes all children and folders that
could outlive the process.
"""

import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_LOCK_SECONDS = 0.5  # for another thread to finish making a child or folder

_making = threading.Lock()
_children: set[subprocess.Popen[Any]] = set()
_folders: set[str] = set()


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a child like ``subprocess.Popen``; ``clear`` kills it if it still runs.

    Raises:
        OSError: the command cannot be started.
    """
    with _making:
        _children.difference_update([child for child in _children if child.returncode is not None])
        child: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        _children.add(child)
    return child


@contextlib.contextmanager
def temporary_folder(prefix: str, within: str | None = None) -> Iterator[str]:
    """Make a folder like ``tempfile.TemporaryDirectory``; ``clear`` removes it if it still exists. ``within``: the
    parent folder, if not the usual one."""
    with _making:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=within)
        _folders.add(folder.name)
    try:
        yield folder.name
    finally:
        folder.cleanup()
        _folders.discard(folder.name)


def clear() -> None:
    """Kill all children and remove all folders, because the process ends now.

    This does not wait for the children. Other threads cannot make more: their calls block until the process is gone.
    """
    _making.acquire(timeout=_LOCK_SECONDS)  # and never release it
    for child in list(_children):
        with contextlib.suppress(OSError):
            child.kill()
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
