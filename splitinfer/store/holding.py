"""Locks between the processes that share a store: nobody removes what another uses, nor do two describe one model.

    .lock               of the store: held for as long as a model is begun or removed
    3f21.../.in-use     of a model: shared by all that copy it or have opened it, taken alone by who removes it

The system frees a lock when its process ends, whatever by (flock(2)), so none is ever left behind.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from splitinfer.errors import ModelError
from splitinfer.store.part import said

_STORE_LOCK, _IN_USE = ".lock", ".in-use"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Hold:
    """A model that is in use, until ``close`` or until nobody has this object any more.

    Raises:
        ModelError: it is being removed.
    """

    def __init__(self, folder: Path) -> None:
        self._file = -1
        try:
            # Not made here: who only reads from a store writes nothing to it.
            self._file = os.open(folder / _IN_USE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            (folder / _IN_USE).stat()  # else it was removed between the two lines before
        except OSError as error:
            self.close()
            raise ModelError(f"{folder} is being removed by another process; try again") from error

    def close(self) -> None:
        """Let it be removed."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()


def make_lock(folder: Path) -> None:
    """Make the lock of a model that is begun.

    Raises:
        ModelError: its folder cannot be written.
    """
    with said(folder):
        os.close(os.open(folder / _IN_USE, _FLAGS, 0o600))


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Whether nobody uses a model, and then nobody begins to while this is entered.

    Raises:
        ModelError: its folder cannot be written.
    """
    with said(folder):
        file = os.open(folder / _IN_USE, _FLAGS, 0o600)
    try:
        yield _locked_alone(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def alone(store: Path) -> Iterator[None]:
    """Wait until no other process begins or removes a model of this store.

    Raises:
        ModelError: the store cannot be written.
    """
    with said(store):
        file = os.open(store / _STORE_LOCK, _FLAGS, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _locked_alone(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
