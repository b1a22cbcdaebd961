"""Sockets by which this user's processes on this machine ask each other; nobody else can reach them.

    ~/Library/Caches/splitinfer/running/HOST/PID      (macOS; elsewhere ~/.cache/...)

Only its owner can enter the folder, and that is what protects a socket: its own permissions are ignored by some systems
(unix(7), "Pathname socket ownership and permissions"). That macOS keeps others out of the folder is *assumed*, as all
of this ran on Linux alone.

The path of a socket has 104 bytes on macOS (unix(4)), 108 on Linux (unix(7)). Where the folder's is longer, PID is a
symbolic link to a socket in a temporary folder, which only its owner can enter, either.

A process that was killed leaves its socket. Nobody answers there, and whoever finds it so removes it; a new one may be
about to listen, so not at once.
"""

import contextlib
import os
import select
import socket
import time
from pathlib import Path

from splitinfer.cleanup import temporary_folder
from splitinfer.places import of_this_host

_LONGEST = 100  # bytes of a path
_YOUNG = 60.0  # seconds in which a socket may not be listened on yet
_SECONDS = 5.0  # to connect


class PrivateListener:
    """Listens on the socket of this process. ``at``: the folder, if not the user's.

    Raises:
        OSError: there can be none.
    """

    def __init__(self, at: Path | None = None) -> None:
        within = at or of_this_host("running")
        within.mkdir(mode=0o700, parents=True, exist_ok=True)
        within.chmod(0o700)
        self._path, self._stack = within / str(os.getpid()), contextlib.ExitStack()
        self._wakes, self._wake = socket.socketpair()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)  # of a process that had this number before
            self._listen()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        if len(os.fsencode(self._path)) <= _LONGEST:
            self._socket.bind(str(self._path))
        else:
            target = Path(self._stack.enter_context(temporary_folder("splitinfer-")), "socket")
            self._socket.bind(str(target))
            self._path.symlink_to(target)
        self._socket.listen()

    def accept(self) -> socket.socket | None:
        """The next connection; ``None`` once ``wake`` was called."""
        ready, _, _ = select.select([self._socket, self._wakes], [], [])
        return None if self._wakes in ready else self._socket.accept()[0]

    def wake(self) -> None:
        """End ``accept``, from any thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Remove the socket. ``accept`` must not be under way."""
        for each in (self._socket, self._wakes, self._wake):
            each.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._stack.close()


def listening(at: Path | None = None) -> dict[int, socket.socket]:
    """A connection to each of this user's processes that listens, by its number. What is left of processes that have
    ended is removed."""
    within, found = at or of_this_host("running"), dict[int, socket.socket]()
    for path in sorted(within.iterdir()) if within.is_dir() else ():
        if path.name.isdecimal() and (connection := _connected(path)) is not None:
            found[int(path.name)] = connection
    return found


def _connected(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_SECONDS)
    try:
        connection.connect(str(path.readlink() if path.is_symlink() else path))
    except OSError as error:
        connection.close()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            _remove_if_old(path)
        return None
    return connection


def _remove_if_old(path: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > _YOUNG:
            path.unlink()
