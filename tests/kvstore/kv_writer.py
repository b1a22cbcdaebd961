"""A process that writes KV, for tests: ``kv_writer.py MODE FOLDER ...``. What goes wrong is said on stderr."""

import logging
import os
import random
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
    {"step": step, "share": share}[mode](Path(folder), *map(int, more))
