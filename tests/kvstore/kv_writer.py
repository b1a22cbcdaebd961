"""A process that writes KV, for tests: ``kv_writer.py MODE FOLDER ...``. What goes wrong is said on stderr."""

import itertools
import logging
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from kv_samples import GROUP, LAYERS, block, buffers, chain, is_right, name_of

from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.record import Buffer
from splitinfer.kvstore.store import Disk, KVStore

FIRST = block(size=50_000, pieces=4)  # what `step` writes


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def fork(path: Path) -> None:
    """Start a process that writes without end, for every line of stdin; it says its id, and every key it has written.
    All end with this one."""
    started: list[int] = []
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _write_without_end(path, first_token=int(line) * 10**6)
        started.append(pid)
    for pid in started:
        os.kill(pid, signal.SIGKILL)  # one that is dead already is not yet waited for, so it is no other's id
        os.waitpid(pid, 0)


def _write_without_end(path: Path, first_token: int) -> None:
    store = KVStore(Disk(path, 10**9), GROUP, LAYERS, {})
    say(f"pid {os.getpid()}")
    for i in itertools.count():
        record = block(first_token + i, size=50_000, pieces=4)
        store.put(record, buffers(record))
        if i % 4 == 3:
            assert store.flush(30)
            for key in store.written():
                say(key.hex())


def step(path: Path) -> None:
    """Write one block, a piece for every line of stdin, as the first thing in a container."""
    os.getpid = lambda: 1

    def pieces() -> Iterator[Buffer]:
        for buffer in buffers(FIRST):
            say("a piece")
            sys.stdin.readline()
            yield buffer

    Folder(path).write(GROUP, name_of(FIRST), FIRST, pieces())
    say("done")


def limit(path: Path) -> None:
    """Write blocks as long as files may have 3,000 bytes, then others."""
    store = KVStore(Disk(path, 10**9), GROUP, LAYERS, {})
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    for i, size in enumerate((5000, 3000, 1000, 5000)):
        record = block(i, size=size, pieces=2)
        store.put(record, buffers(record))
    assert store.flush(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    record = block(9, size=5000)
    store.put(record, buffers(record))
    assert store.flush(30)
    say(str(len(store.written())))


def share(path: Path, seed: int, cap: int) -> None:
    """Put and get the same blocks as others do at the same time."""
    pick, store = random.Random(seed), KVStore(Disk(path, cap), GROUP, LAYERS, {"model": "m"})
    conversations = [chain(6, 1000 * i) for i in range(8)]
    store.offer()
    num_read = 0
    for _ in range(60):
        conversation = pick.choice(conversations)
        for record in conversation[: pick.randint(1, 6)]:
            store.put(record, buffers(record))
        if pick.random() < 0.2:
            store.erase([pick.choice(conversation).key])
        assert store.flush(30)
        for key in pick.sample(store.offer() if pick.random() < 0.5 else store.written(), 1):
            found = store.get(key)
            assert found is None or all(is_right(*one) for one in found)
            num_read += found is not None
    store.close(30)
    say(str(num_read))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    mode, folder, *more = sys.argv[1:]
    {"fork": fork, "step": step, "limit": limit, "share": share}[mode](Path(folder), *map(int, more))
