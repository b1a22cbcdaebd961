"""A stage's blocks on disk: written behind, read at once; and whatever goes wrong, nobody is told more than a line."""

import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kv_samples import GROUP, LAYERS, OTHER_GROUP, block, buffers, chain, flip, flush, is_right, name_of
from processes import until

from splitinfer.core.kv.block_tree import Key
from splitinfer.kvstore import store as module
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.record import Record
from splitinfer.kvstore.store import Disk, KVStore

LARGE = 10**9
HEADERS = 500  # bytes of a sample's file beside its arrays, and more
Open = Callable[..., KVStore]


@pytest.fixture(autouse=True)
def no_order_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What goes wrong with the disk is foreseen; anything else is an error in the log."""
    caplog.set_level(logging.INFO)
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_store(path: Path) -> Iterator[Open]:
    stores: list[KVStore] = []

    def opened(layers: tuple[int, int] = LAYERS, group: str = GROUP, cap: int = LARGE, at: Path = path) -> KVStore:
        stores.append(KVStore(Disk(at, cap), group, layers, {"model": "a model"}))
        return stores[-1]

    yield opened
    for store in stores:
        store.close(30)
        assert not store._thread.is_alive()


class Gate:
    """Holds writers back until it is opened; counts them, and has as many as told fail with a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.num_written, self.num_failing = threading.Event(), 0, 0
        self._write = Folder.write
        self.opened.set()
        monkeypatch.setattr(Folder, "write", lambda *args: self._pass(*args))

    def _pass(self, *args: Any) -> int:
        assert self.opened.wait(30)
        if self.num_failing:
            self.num_failing -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.num_written += 1
        return self._write(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def put(store: KVStore, *records: Record) -> tuple[Key, ...]:
    """Write blocks, one after another; the keys of those that were."""
    for record in records:
        store.put(record, buffers(record))
        assert flush(store)
    return store.written()


def keys_of(records: Sequence[Record]) -> tuple[Key, ...]:
    return tuple(record.key for record in records)


def holds(store: KVStore, record: Record) -> bool:
    """Whether a store has a block; if so, it is right."""
    found = store.get(record.key)
    assert found is None or (found[0] == record and is_right(*found))
    return found is not None


def file_of(path: Path, record: Record, layers: tuple[int, int] = LAYERS) -> Path:
    return path / GROUP / str(name_of(record, layers))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- in peace ----------------------------------------------------------------------------------------


def test_what_was_put_is_read_by_the_same_store_and_by_a_new_one(open_store: Open, caplog: pytest.LogCaptureFixture):
    store, records = open_store(), chain(3)
    assert store.offer() == ()
    assert put(store, *records) == keys_of(records)
    assert store.written() == (), "each is told of once"
    assert all(holds(store, record) for record in records)
    new = open_store()
    assert not holds(new, records[0]), "it has not looked yet"
    assert set(new.offer()) == set(keys_of(records))
    assert all(holds(new, record) for record in records)
    assert not holds(new, block(7))
    assert warnings(caplog) == []


def test_nobody_waits_for_the_disk_and_is_told_only_what_is_on_it(open_store: Open, gate: Gate):
    store, records = open_store(), chain(2)
    gate.opened.clear()
    for record in records:
        store.put(record, buffers(record))
    store.touch(keys_of(records))
    store.erase([block(7).key])
    assert store.offer() == store.written() == ()
    assert not holds(store, records[0])
    assert not flush(store, 0.01)
    gate.opened.set()
    assert flush(store)
    assert store.written() == keys_of(records)
    assert set(store.offer()) == set(keys_of(records))


def test_a_writer_that_waits_holds_no_block_in_memory(open_store: Open):
    class Array(bytearray):
        """Bytes that can be watched."""

    store, record = open_store(), block()
    arrays = [Array(one) for one in buffers(record)]
    held = [weakref.ref(array) for array in arrays]
    store.put(record, arrays)
    del arrays
    until(lambda: store.written() == (record.key,), "it is written")
    until(lambda: [array() for array in held] == [None, None], "nobody has its bytes")


def test_what_is_there_already_is_told_of_and_not_written(open_store: Open, gate: Gate):
    store, record = open_store(), block()
    assert put(store, record) == put(store, record) == (record.key,)
    assert gate.num_written == 1
    new = open_store()
    new.offer()
    assert put(new, record) == (record.key,)
    assert gate.num_written == 1


def test_what_is_erased_is_gone_for_all(open_store: Open, path: Path):
    store, records = open_store(), [block(i) for i in range(3)]
    put(store, *records)
    store.erase([records[1].key, block(7).key])
    assert flush(store)
    assert [holds(store, record) for record in records] == [True, False, True]
    assert set(open_store().offer()) == {records[0].key, records[2].key}
    assert not file_of(path, records[1]).exists()


def test_the_last_used_are_offered_first(open_store: Open, path: Path, monkeypatch: pytest.MonkeyPatch):
    store, records = open_store(), [block(i) for i in range(4)]
    put(store, *records)
    for record, used in zip(records, (10, 30, 20, 40), strict=True):
        os.utime(file_of(path, record), (used, used))
    assert store.offer() == keys_of([records[i] for i in (3, 1, 2, 0)])
    store.touch([records[0].key])
    assert flush(store)
    assert store.offer() == keys_of([records[i] for i in (0, 3, 1, 2)])
    os.utime(file_of(path, records[0]), (50, 50))
    assert holds(store, records[2]), "what is read is used"
    assert flush(store)
    assert store.offer() == keys_of([records[i] for i in (2, 0, 3, 1)])
    monkeypatch.setattr(module, "_MAX_OFFERED", 2)
    assert store.offer() == keys_of([records[2], records[0]])


def test_headers_tell_what_can_be_read(open_store: Open, path: Path):
    store, records = open_store(), chain(4)
    put(store, *records)
    file_of(path, records[1]).write_bytes(b"nothing")
    file_of(path, records[2]).unlink()
    assert store.headers([*keys_of(records), block(7).key]) == [records[0], records[3]]
    assert not file_of(path, records[1]).exists()
    assert store.headers(keys_of(records)) == [records[0], records[3]]


def test_what_is_written_while_the_folder_is_looked_at_is_not_forgotten(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
):
    store, record = open_store(), block()
    looked, added = threading.Event(), threading.Event()
    files, write = Folder.files, Folder.write

    def slow_files(folder: Folder, group: str) -> Any:
        found = files(folder, group)
        if threading.current_thread() is threading.main_thread():
            looked.set()
            added.wait(0.3)  # whoever does not have to wait for us is done by now
        return found

    def late_write(*args: Any) -> int:
        assert looked.wait(30)
        return write(*args)

    monkeypatch.setattr(Folder, "files", slow_files)
    monkeypatch.setattr(Folder, "write", late_write)
    store.put(record, buffers(record))
    store._commands.put(added.set)
    store.offer()
    assert flush(store)
    assert store.written() == (record.key,)
    assert holds(store, record)


def test_a_damaged_file_is_removed_and_written_again(open_store: Open, path: Path, caplog: pytest.LogCaptureFixture):
    store, record, other = open_store(), block(), block(7)
    put(store, record, other)
    file = file_of(path, record)
    flip(file)
    new = open_store()
    assert set(new.offer()) == {record.key, other.key}
    assert new.get(record.key) is None
    assert [str(name_of(record)) in line and "damaged" in line for line in warnings(caplog)] == [True]
    assert not file.exists()
    assert new.offer() == (other.key,)
    assert put(new, record) == (record.key,)
    assert holds(new, record)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_the_folder_what_is_read_is_right(open_store: Open, path: Path, seed: int):
    pick = random.Random(seed)
    stores = [open_store(cap=pick.choice([8_000, LARGE])), open_store()]
    records = [*chain(4), *chain(4, 100), *(block(1000 + i) for i in range(4))]

    def spoil() -> None:
        files = sorted(path.rglob("*.kv"))
        if not files:
            return
        file, other = pick.choice(files), pick.choice(files)
        mischief: list[Callable[[], object]] = [
            lambda: flip(file, pick),
            lambda: os.truncate(file, pick.randrange(2000)),
            lambda: file.write_bytes(other.read_bytes()),
            lambda: file.replace(other),
            file.unlink,
            lambda: (file.unlink(), file.mkdir()),
            lambda: shutil.rmtree(path),
        ]
        with contextlib.suppress(OSError):  # a store is at work there, too
            pick.choice(mischief)()

    num_right = 0
    for _ in range(60):
        store, record = pick.choice(stores), pick.choice(records)
        deeds: list[Callable[[], object]] = [
            lambda store=store, record=record: store.put(record, buffers(record)),
            lambda store=store, record=record: store.put(record, buffers(record)),
            lambda store=store, record=record: store.erase([record.key]),
            lambda store=store: store.headers(store.offer()),
            lambda store=store: flush(store),
            spoil,
        ]
        pick.choice(deeds)()
        num_right += sum(holds(store, one) for one in pick.sample(records, 3))
    assert num_right
    for store in stores:
        assert flush(store)
    for folder in [one for one in path.rglob("*.kv") if one.is_dir()]:
        folder.rmdir()
    new = open_store()
    new.offer()
    for record in records:
        assert holds(new, record) or (put(new, record) == (record.key,) and holds(new, record))


def test_a_full_disk_is_one_warning_until_it_works_again(
    open_store: Open, path: Path, caplog: pytest.LogCaptureFixture, gate: Gate
):
    store, records = open_store(), [block(i) for i in range(8)]
    gate.num_failing = 3
    assert put(store, *records[:3]) == ()
    assert [line.count("No space left on device; it is kept in memory only") for line in warnings(caplog)] == [1]
    assert put(store, *records[3:5]) == keys_of(records[3:5])
    assert len(warnings(caplog)) == 1
    gate.num_failing = 1
    assert put(store, *records[:2]) == keys_of(records[1:2])
    assert len(warnings(caplog)) == 2
    assert [holds(store, record) for record in records] == [False, True, False, True, True, False, False, False]


def test_where_nothing_can_be_kept_nothing_is(open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a file").write_text("of another")
    store, record = open_store(at=tmp_path / "a file" / "kv"), block()
    assert store.offer() == ()
    for _ in range(3):
        assert put(store, record) == ()
        assert not holds(store, record)
    store.touch([record.key])
    store.erase([record.key])
    assert store.headers([record.key]) == []
    assert flush(store)
    assert len(warnings(caplog)) == 1
    assert (tmp_path / "a file").read_text() == "of another"


def test_what_waits_is_bounded(open_store: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_MAX_QUEUED_BYTES", 5000)
    store, records = open_store(), [block(i) for i in range(5)]
    gate.opened.clear()
    for record in records[:4]:
        store.put(record, buffers(record))  # 2,000 bytes each
    gate.opened.set()
    assert flush(store)
    assert store.written() == keys_of(records[:2])
    gate.num_failing = 1
    assert put(store, *records[2:]) == keys_of(records[3:]), "neither what was written nor what failed waits any more"


# -- the cap -----------------------------------------------------------------------------------------


def total(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.kv"))


def test_the_cap_is_kept_whatever_is_put(open_store: Open, path: Path):
    pick, store, written = random.Random(1), open_store(cap=12_000), list[Key]()
    for i in range(60):
        written += put(store, *chain(pick.randint(1, 4), i * 1000, size=pick.randint(1, 1500)))
        assert total(path) <= 12_000 + HEADERS
        assert i < 20 or total(path) > 12_000 - 2 * 3000, "no more goes than must"
    assert len(written) > 60
    assert set(store.offer()) <= set(written)
    assert all(store._names.values()), "of what is gone nothing is kept"


def test_files_of_other_groups_and_processes_count_and_go_too(
    open_store: Open, path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, other = open_store(cap=10_000), open_store(group=OTHER_GROUP)
    put(store, block(0))
    put(other, *(block(10 + i) for i in range(8)))
    assert total(path) > 16_000
    monkeypatch.setattr(module, "_SCAN_EVERY", -1.0)  # now, and not within a minute
    put(store, block(1))
    assert total(path) <= 10_000 + HEADERS
    assert holds(store, block(1))
    assert not holds(store, block(0)), "it was the oldest"
    assert open_store(group=OTHER_GROUP).offer() == keys_of([block(17), block(16), block(15)])


def test_a_conversation_longer_than_the_cap_keeps_its_beginning(open_store: Open, path: Path):
    """If those before a block made room for it, it would be of no use."""
    store, records = open_store(cap=10_000), chain(20)
    store.offer()
    assert put(store, *records) == keys_of(records[:4])
    assert set(store.offer()) == set(keys_of(records[:4]))
    later = chain(2, 5000)
    assert put(store, *later) == keys_of(later), "another one takes its place"
    assert set(store.offer()) == set(keys_of([*records[:2], *later]))


def test_what_comes_after_a_block_that_is_not_there_is_not_written(open_store: Open, gate: Gate):
    store, (one, two, three) = open_store(), chain(3)
    gate.num_failing = 1
    assert put(store, one, two, three) == ()
    assert put(store, one, two, three) == keys_of([one, two, three])
    new = open_store()
    new.offer()
    (*_, four) = chain(4)
    assert put(new, four) == (four.key,), "that the others are there is known from looking"


@pytest.mark.parametrize("size", [1000, 6000])
def test_a_block_larger_than_the_cap_is_not_kept_and_takes_nobodys_place(
    open_store: Open, caplog: pytest.LogCaptureFixture, size: int
):
    store = open_store(cap=5000)
    put(store, block(0))
    assert put(store, block(1, size=size)) == ((block(1, size=size).key,) if size == 1000 else ())
    assert len(warnings(caplog)) == (size > 1000)
    assert holds(store, block(0))


def test_half_of_what_is_free_is_left_to_others(open_store: Open, path: Path, monkeypatch: pytest.MonkeyPatch):
    before = 20_000
    monkeypatch.setattr(Folder, "free_bytes", lambda _: before - total(path))
    store = open_store()
    for i in range(20):
        put(store, block(i))
    assert 6000 < total(path) <= before // 2 + HEADERS
    assert holds(store, block(19))
