"""Blocks of KV for tests, with bytes that follow from their keys, so that whoever reads one knows what is right."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path

from splitinfer.core.kv.block_tree import KEY_BYTES
from splitinfer.core.plan import StoredPart, TensorSpec
from splitinfer.kvstore.index import FileName
from splitinfer.kvstore.record import Record
from splitinfer.kvstore.store import KVStore

ROOT = b"r" * KEY_BYTES
GROUP = "0123456789abcdef"
OTHER_GROUP = "fedcba9876543210"
LAYERS = (0, 4)


def chain(length: int, first_token: int = 0, *, size: int = 1000, pieces: int = 2, tokens: int = 4) -> list[Record]:
    """A conversation's blocks, one after another; each has ``pieces`` arrays of ``size`` bytes."""
    made: list[Record] = []
    arrays = (TensorSpec("uint8", (size,)),) * pieces
    for i in range(length):
        start = i * tokens
        parent = made[-1].key if made else ROOT
        said = tuple(range(first_token + start, first_token + start + tokens))
        made.append(Record(parent, said, start, (StoredPart((0,), True, start, start + tokens, arrays),)))
    return made


def block(first_token: int = 0, *, size: int = 1000, pieces: int = 2) -> Record:
    """A block that comes after no other."""
    return chain(1, first_token, size=size, pieces=pieces)[0]


def buffers(record: Record, salt: int = 0) -> list[bytes]:
    """The right bytes of a block's arrays; others with ``salt``."""
    noise = random.Random(record.key + bytes([salt]))
    return [noise.randbytes(array.shape[0]) for part in record.parts for array in part.arrays]


def name_of(record: Record, layers: tuple[int, int] = LAYERS) -> FileName:
    return FileName(record.key, record.parent, record.start, record.end, *layers)


def flip(file: Path, pick: random.Random | None = None) -> None:
    """Change a bit of a file: any, or one of its last array."""
    data = bytearray(file.read_bytes())
    data[-5 if pick is None else pick.randrange(len(data))] ^= 1 << (0 if pick is None else pick.randrange(8))
    file.write_bytes(data)


def is_right(record: Record, read: Sequence[memoryview], salt: int = 0) -> bool:
    return [bytes(one) for one in read] == buffers(record, salt)


def flush(store: KVStore, seconds: float = 30) -> bool:
    """Wait for the writer's commands so far; whether they are done within ``seconds``."""
    done = threading.Event()
    store._commands.put(done.set)
    return done.wait(seconds)
