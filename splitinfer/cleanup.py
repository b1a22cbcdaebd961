"""Child processes and temporary folders, known by name until they are gone.

A process that unwinds its stack ends its children and removes its folders where it made them. One that must end at
once cannot unwind: the command line calls ``clear`` and leaves. Whatever may outlive its owner for longer than a
moment is therefore made here.
"""

import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_LOCK_SECONDS = 0.5  # for another thread to finish the child or folder that it is making

_making = threading.Lock()
_children: set[subprocess.Popen[Any]] = set()
_folders: set[str] = set()


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen``, of a child that ``clear`` kills if it still runs.

    Raises:
        OSError: the command cannot be started.
    """
    with _making:
        _children.difference_update([child for child in _children if child.returncode is not None])
        child: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        _children.add(child)
    return child


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """``tempfile.TemporaryDirectory``, of a folder that ``clear`` removes if it is still there."""
    with _making:
        folder = tempfile.TemporaryDirectory(prefix=prefix)
        _folders.add(folder.name)
    try:
        yield folder.name
    finally:
        folder.cleanup()
        _folders.discard(folder.name)


def clear() -> None:
    """Kill the children and remove the folders of a process that ends now: it can make no others afterwards.

    Children are killed, not asked and not waited for. Whoever would make another waits until the process is gone.
    """
    _making.acquire(timeout=_LOCK_SECONDS)  # for good
    for child in list(_children):
        with contextlib.suppress(OSError):
            child.kill()
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
