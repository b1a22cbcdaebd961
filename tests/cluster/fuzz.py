"""Mutated frames through every decoder: nothing but the errors that are meant for it, and flat memory.

A frame is a real one (a step with hidden states, a load order, a result ...) with bits flipped, bytes cut,
doubled or replaced, at one of four depths: the packet on the wire, the message in its header, the tensor in its
payload, the same in fewer bytes. Checksums would stop nearly all of the first, so the others go in below them.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
from every_message import EXAMPLES, mutate

from splitinfer.core.plan import (
    TensorSpec,
)  # fmt: skip
from splitinfer.core.wire_codec import CODECS, Packing
from splitinfer.errors import ProtocolError
from splitinfer.models.hidden_states import PackedRows, ReceivedRows, Sent, to_parts
from splitinfer.models.tensors import from_buffer
from splitinfer.wire import codec
from transports import FrameError, LinkOptions
from transports.framing import Kind, decode, encode

MESSAGES = [*EXAMPLES.values()]
HIDDEN = np.arange(24, dtype=np.uint16).tobytes()


def through_framing(chance: random.Random) -> str:
    """A packet as it comes from the network."""
    header = codec.encode(chance.choice(MESSAGES))
    parts = [
        bytes(memoryview(p)) for p in encode(Kind.DATA, seq=3, progress=1, header=header, parts=(memoryview(HIDDEN),))
    ]
    victim = chance.randrange(len(parts))
    parts[victim] = mutate(parts[victim], chance)
    try:
        packet = decode([memoryview(p) for p in parts], LinkOptions())
        through_codec_bytes(bytes(packet.header))
    except (FrameError, ProtocolError):
        return "refused"
    return "read"


def through_codec(chance: random.Random) -> str:
    """A message whose checksum is right."""
    try:
        through_codec_bytes(mutate(codec.encode(chance.choice(MESSAGES)), chance))
    except ProtocolError:
        return "refused"
    return "read"


def through_codec_bytes(header: bytes) -> None:
    """Whatever can be read can also be written."""
    codec.encode(codec.decode(header))


def through_tensors(chance: random.Random) -> str:
    """Hidden states whose description or bytes are wrong."""
    shape = tuple(chance.choice((-1, 0, 1, 3, 8, 24, 2**31, 2**62)) for _ in range(chance.randint(0, 4)))
    dtype = chance.choice(("bfloat16", "float16", "float32", "int32", "", "object"))
    try:
        from_buffer(TensorSpec(dtype, shape), mutate(HIDDEN, chance))
    except ProtocolError:
        return "refused"
    return "read"


def _packed_parts() -> dict[str, Sent]:
    rows = mx.random.normal((6, 200), key=mx.random.key(1))
    return {name: to_parts(rows, PackedRows.of(name, rows, [1, 2, 4])) for name in CODECS}


PACKED = _packed_parts()


def through_packing(chance: random.Random) -> str:
    """Hidden states in fewer bytes, of which a part, or what is said of them, is wrong. Computed, if they are taken."""
    name = chance.choice(CODECS)
    out = PACKED[name]
    assert out.spec is not None
    parts, packing, shape = list(out.parts), out.packing, list(out.spec.shape)
    match chance.randrange(4):
        case 0:
            shape[chance.randrange(2)] = chance.choice((-1, 0, 1, 5, 7, 199, 2**16, 2**62))
        case 1:
            packing = Packing(chance.choice(CODECS), ((chance.randrange(3), chance.randrange(3, 9)),))
        case _:
            victim = chance.randrange(len(parts))
            parts[victim] = memoryview(mutate(bytes(parts[victim]), chance))
    try:
        mx.eval(ReceivedRows(TensorSpec(out.spec.dtype, tuple(shape)), packing, parts).array())
    except ProtocolError:
        return "refused"
    return "read"


DECODERS: dict[str, Callable[[random.Random], str]] = {
    "framing": through_framing,
    "codec": through_codec,
    "tensors": through_tensors,
    "packing": through_packing,
}


def run(num_frames: int, seed: int = 0) -> dict[str, Any]:
    """``num_frames`` mutated frames, as many through each decoder; counts and growth of memory in bytes."""
    chance, counts, process = random.Random(seed), Counter[str](), psutil.Process()
    settled, began = 0, time.monotonic()
    for i in range(num_frames):
        if i == num_frames // 10:
            settled = process.memory_info().rss
        name = list(DECODERS)[i % len(DECODERS)]
        counts[f"{name} {DECODERS[name](chance)}"] += 1
    growth = process.memory_info().rss - settled
    return {"frames": num_frames, **counts, "memory_growth": growth, "seconds": time.monotonic() - began}
