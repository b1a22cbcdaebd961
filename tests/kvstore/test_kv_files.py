"""Files are whole or not there; what is not ours stays as it is; and a folder may be anything, or not exist."""

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_samples import GROUP, block, buffers, chain, is_right, name_of

from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.record import Buffer, Damaged


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")


def entries(folder: Folder) -> list[str]:
    group = folder.path / GROUP
    return sorted(path.name for path in group.iterdir()) if group.exists() else []


def test_a_file_is_not_there_before_its_last_byte(folder: Folder):
    record = block(pieces=5)
    name, seen = name_of(record), list[int]()

    def watched() -> Iterator[Buffer]:
        for buffer in buffers(record):
            assert folder.files(GROUP) == []
            with pytest.raises(FileNotFoundError):
                folder.read(GROUP, name)
            yield buffer
            seen.append(sum(path.stat().st_size for path in (folder.path / GROUP).iterdir()))

    folder.write(GROUP, name, record, watched())
    assert seen == sorted(set(seen)), "it grew piece by piece"
    assert is_right(record, folder.read(GROUP, name)[1])


def test_what_a_killed_writer_left_is_no_block_and_goes_once_it_is_old(folder: Folder):
    record = block(pieces=3)
    name, left = name_of(record), dict[Path, bytes]()

    def watched() -> Iterator[Buffer]:
        for buffer in buffers(record):
            left.update({path: path.read_bytes() for path in (folder.path / GROUP).iterdir()})
            yield buffer

    folder.write(GROUP, name, record, watched())
    folder.remove(GROUP, name)
    ((path, data),) = left.items()
    path.write_bytes(data)
    assert len(data) > 2000
    assert folder.files(GROUP) == []
    folder.write(GROUP, name, record, buffers(record))  # the same block again, by the same process id
    assert is_right(record, folder.read(GROUP, name)[1])
    assert folder.sweep() == (0, 0), "its writer may still be at work"
    os.utime(path, (1000, 1000))
    assert folder.sweep() == (1, len(data))
    assert entries(folder) == [str(name)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_write_that_fails_leaves_what_was_there(folder: Folder, error: BaseException, after: int, is_there: bool):
    record = block()
    if is_there:
        folder.write(GROUP, name_of(record), record, buffers(record))

    def failing() -> Iterator[Buffer]:
        yield from buffers(record)[:after]
        raise error

    with pytest.raises(type(error)):
        folder.write(GROUP, name_of(record), record, failing())
    assert entries(folder) == [str(name_of(record))] * is_there
    assert not is_there or is_right(record, folder.read(GROUP, name_of(record))[1])


def test_a_file_under_a_wrong_name_is_damaged(folder: Folder):
    first, second = chain(2)
    folder.write(GROUP, name_of(second), second, buffers(second))
    right = folder.path / GROUP / str(name_of(second))
    name = name_of(second)
    for wrong in (
        replace(name, key=first.key),
        replace(name, start=name.start + 1),
        replace(name, end=name.end + 1),
        replace(name, parent=bytes(16)),
    ):
        (folder.path / GROUP / str(wrong)).write_bytes(right.read_bytes())
        with pytest.raises(Damaged):
            folder.read(GROUP, wrong)
    assert folder.read(GROUP, name)[0] == second


def test_a_file_that_is_larger_than_memory_is_damaged(folder: Folder):
    record = block()
    folder.write(GROUP, name_of(record), record, buffers(record))
    os.truncate(folder.path / GROUP / str(name_of(record)), 2**41)
    with pytest.raises(Damaged):
        folder.read(GROUP, name_of(record))


def test_what_is_no_file_is_not_listed(folder: Folder, tmp_path: Path):
    """A pipe would be waited for; and a folder could not be removed, however often its turn came."""
    group = folder.path / GROUP
    group.mkdir(parents=True)
    one, two, three = (str(name_of(block(i))) for i in range(3))
    os.mkfifo(group / one)
    (group / two).mkdir()
    (tmp_path / "elsewhere").write_bytes(b"x")
    (group / three).symlink_to(tmp_path / "elsewhere")
    assert folder.files(GROUP) == []
