"""Files are whole or not there; what is not ours stays as it is; and a folder may be anything, or not exist."""

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kv_samples import GROUP, OTHER_GROUP, block, buffers, chain, is_right, name_of

from splitinfer.kvstore import files as module
from splitinfer.kvstore.files import ABOUT, Folder
from splitinfer.kvstore.record import Buffer, Damaged


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv")


def entries(folder: Folder) -> list[str]:
    group = folder.path / GROUP
    return sorted(path.name for path in group.iterdir()) if group.exists() else []


def leave_unfinished(folder: Folder) -> Path:
    """A temporary file as a writer that is killed leaves it: 1,000 bytes long."""
    record, before, found = block(), entries(folder), list[str]()

    def failing() -> Iterator[Buffer]:
        found.extend(name for name in entries(folder) if name not in before)
        yield b""
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        folder.write(GROUP, name_of(record), record, failing())
    (name,) = found
    (folder.path / GROUP / name).write_bytes(bytes(1000))
    return folder.path / GROUP / name


def test_what_is_written_is_read(folder: Folder):
    for record in chain(3):
        nbytes = folder.write(GROUP, name_of(record), record, buffers(record))
        assert nbytes == (folder.path / GROUP / str(name_of(record))).stat().st_size
        read, found = folder.read(GROUP, name_of(record))
        assert read == record
        assert is_right(record, found)
        assert folder.header(GROUP, name_of(record)) == record
    assert {file.name for file in folder.files(GROUP)} == {name_of(record) for record in chain(3)}
    assert entries(folder) == sorted(str(name_of(record)) for record in chain(3))


def test_arrays_of_any_shape_are_written_as_their_bytes(folder: Folder):
    record = block(size=6, pieces=1)
    for buffer in (b"abcdef", bytearray(b"abcdef"), memoryview(b"abcdef").cast("B", shape=[2, 3])):
        folder.write(GROUP, name_of(record), record, [buffer])
        assert bytes(folder.read(GROUP, name_of(record))[1][0]) == b"abcdef"
    nothing = block(size=0, pieces=2)
    folder.write(GROUP, name_of(nothing), nothing, [b"", memoryview(b"")])
    assert folder.read(GROUP, name_of(nothing))[0] == nothing


def test_a_disk_that_takes_a_little_at_a_time_gets_all():
    class Slow:
        def __init__(self) -> None:
            self.taken = b""

        def write(self, view: memoryview) -> int:
            self.taken += bytes(view[:3])
            return len(view[:3])

    slow = Slow()
    assert module._write_all(slow, memoryview(b"abcdefgh")) == 8
    assert slow.taken == b"abcdefgh"


# -- while it is written -----------------------------------------------------------------------------


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


def test_a_reader_sees_the_old_file_or_the_new_one(folder: Folder):
    record = block(size=20_000, pieces=4)
    name, done, wrong = name_of(record), threading.Event(), list[object]()
    folder.write(GROUP, name, record, buffers(record))

    def read() -> None:
        try:
            while not done.is_set():
                found = folder.read(GROUP, name)[1]
                if not (is_right(record, found) or is_right(record, found, salt=1)):
                    wrong.append(found)
        except (OSError, Damaged) as error:
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(100):
        folder.write(GROUP, name, record, buffers(record, salt=i % 2))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_write_that_fails_leaves_nothing(folder: Folder, error: BaseException, after: int):
    record = block()

    def failing() -> Iterator[Buffer]:
        yield from buffers(record)[:after]
        raise error

    with pytest.raises(type(error)):
        folder.write(GROUP, name_of(record), record, failing())
    assert entries(folder) == []


def test_a_write_that_fails_leaves_the_file_that_was_there(folder: Folder):
    record = block()
    folder.write(GROUP, name_of(record), record, buffers(record))

    def failing() -> Iterator[Buffer]:
        raise OSError
        yield b""

    with pytest.raises(OSError):  # noqa: PT011
        folder.write(GROUP, name_of(record), record, failing())
    assert is_right(record, folder.read(GROUP, name_of(record))[1])


# -- what is wrong with a file -----------------------------------------------------------------------


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


@pytest.mark.parametrize("length", [0, 5, 12, 20, 100])
def test_a_file_that_was_cut_short_is_damaged(folder: Folder, length: int):
    record = block()
    folder.write(GROUP, name_of(record), record, buffers(record))
    os.truncate(folder.path / GROUP / str(name_of(record)), length)
    with pytest.raises(Damaged):
        folder.read(GROUP, name_of(record))
    with pytest.raises(Damaged):
        folder.header(GROUP, name_of(record))


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


# -- the folder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "a file"])
def test_a_folder_that_is_not_there_is_empty(tmp_path: Path, below: str):
    (tmp_path / "a file").touch()
    folder = Folder(tmp_path / below / "kv")
    record = block()
    assert folder.groups() == folder.files(GROUP) == folder.all_files() == []
    assert folder.about(GROUP) == {}
    assert folder.sweep(0) == (0, 0)
    assert folder.free_bytes() > 0
    folder.touch(GROUP, name_of(record))
    folder.remove(GROUP, name_of(record))
    folder.remove_group(GROUP)
    with pytest.raises(OSError, match="directory"):
        folder.read(GROUP, name_of(record))
    assert not folder.path.exists()


def test_where_no_folder_can_be_writing_fails(tmp_path: Path):
    (tmp_path / "a file").touch()
    folder, record = Folder(tmp_path / "a file" / "kv"), block()
    with pytest.raises(OSError, match="directory"):
        folder.write(GROUP, name_of(record), record, buffers(record))
    with pytest.raises(OSError, match="directory"):
        folder.describe(GROUP, {"model": "m"})


def test_groups_have_each_their_own(folder: Folder):
    one, two = block(1), block(2)
    folder.write(GROUP, name_of(one), one, buffers(one))
    folder.write(OTHER_GROUP, name_of(two), two, buffers(two))
    assert folder.groups() == [GROUP, OTHER_GROUP]
    assert [file.name for file in folder.files(GROUP)] == [name_of(one)]
    assert {(file.group, file.name) for file in folder.all_files()} == {
        (GROUP, name_of(one)),
        (OTHER_GROUP, name_of(two)),
    }
    folder.remove_group(GROUP)
    assert folder.groups() == [OTHER_GROUP]
    folder.remove(OTHER_GROUP, name_of(two))
    folder.remove(OTHER_GROUP, name_of(two))
    assert folder.all_files() == []


def test_what_is_touched_was_used_now(folder: Folder):
    record = block()
    folder.write(GROUP, name_of(record), record, buffers(record))
    os.utime(folder.path / GROUP / str(name_of(record)), (1000, 1000))
    assert [file.used for file in folder.files(GROUP)] == [1000]
    folder.touch(GROUP, name_of(record))
    assert folder.files(GROUP)[0].used > 1000


def test_a_group_is_described_once(folder: Folder):
    folder.describe(GROUP, {"model": "first"})
    folder.describe(GROUP, {"model": "second"})
    assert folder.about(GROUP) == {"model": "first"}
    assert entries(folder) == [ABOUT]
    assert folder.files(GROUP) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "[" * 100_000, "\udcff"])
def test_a_wrong_description_is_none(folder: Folder, text: str):
    folder.describe(GROUP, {})
    (folder.path / GROUP / ABOUT).write_bytes(text.encode(errors="surrogateescape"))
    assert folder.about(GROUP) == {}


# -- what others have there --------------------------------------------------------------------------


def test_only_what_was_left_long_ago_is_swept(folder: Folder):
    kept = block(5)
    folder.write(GROUP, name_of(kept), kept, buffers(kept))
    old, new = leave_unfinished(folder), leave_unfinished(folder)
    for path in (old, folder.path / GROUP / str(name_of(kept))):
        os.utime(path, (1000, 1000))
    assert folder.sweep(stale=100) == (1, 1000)
    assert entries(folder) == sorted([new.name, str(name_of(kept))])
    assert folder.sweep(stale=0) == (1, 1000)
    assert entries(folder) == [str(name_of(kept))]


def test_the_files_of_others_stay(folder: Folder):
    """Someone may name a folder in which there is more than KV."""
    kept = block()
    folder.write(GROUP, name_of(kept), kept, buffers(kept))
    folder.describe(GROUP, {"model": "m"})
    thesis = [folder.path / "thesis" / name for name in ("thesis.tex", "thesis.tmp", ".thesis.123-4.tmp", "about.json")]
    thesis.append(folder.path / GROUP / "notes.tmp")
    for path in thesis:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        os.utime(path, (1000, 1000))
    assert folder.sweep(stale=0) == (0, 0)
    for group in folder.groups():
        folder.remove_group(group)
    assert all(path.exists() for path in thesis)
    assert entries(folder) == ["notes.tmp"]
