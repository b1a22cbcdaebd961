"""A process that writes one block of KV, for tests: ``kv_writer.py FOLDER``, a piece for every line of stdin, as the
first thing in a container."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kv_samples import GROUP, block, buffers, name_of

from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.record import Buffer

FIRST = block(size=50_000, pieces=4)


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def pieces() -> Iterator[Buffer]:
    for buffer in buffers(FIRST):
        say("a piece")
        sys.stdin.readline()
        yield buffer


if __name__ == "__main__":
    os.getpid = lambda: 1
    Folder(Path(sys.argv[1])).write(GROUP, name_of(FIRST), FIRST, pieces())
    say("done")
