"""Decodes each picture in a process of its own, so that none can harm this one.

A picture is a program for its decoder: a few bytes may ask for gigabytes or for minutes, and any sender can reach a
decoder's bugs. So bytes, pixels, seconds and memory have bounds, and few pictures are decoded at a time.
"""

import contextlib
import json
import math
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from splitinfer.errors import ContextExceeded, NotInstalled, RequestError
from splitinfer.pictures.families import RGB
from splitinfer.pictures.sizes import Fit

_AT_ONCE = 4
_COMMAND = ["-m", "splitinfer.pictures.decoder"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request's pictures. ``nbytes``, ``pixels``: of one picture. ``fitted``: pixels of all pictures in
    the model's sizes. ``memory``: bytes of the decoding process; macOS does not enforce it."""

    pictures: int = 16
    nbytes: int = 20 * 10**6
    pixels: int = 50 * 10**6
    fitted: int = 100 * 10**6
    seconds: int = 10
    memory: int = 2 * 10**9


_turn = threading.BoundedSemaphore(_AT_ONCE)


def decode(data: bytes, fit: Fit, limits: Limits, room: int | None = None) -> RGB:
    """Return the pixels [height, width, 3] of a picture, in the size that ``fit`` asks for. ``room``: the most pixels.

    Raises:
        ContextExceeded: it would have more than ``room``; no pixel was decoded.
        RequestError: it cannot be decoded within the limits; one sentence says why.
        NotInstalled: Pillow is missing.
    """
    if find_spec("PIL") is None:
        raise NotInstalled("pictures need Pillow: pip install pillow")
    if len(data) > limits.nbytes:
        raise RequestError(f"a picture has {len(data):,} bytes; at most {limits.nbytes:,} are read")
    room = limits.fitted if room is None else room
    asked = {"fit": list(fit), "most_pixels": limits.pixels, "room": room}
    asked |= {"seconds": limits.seconds, "memory": limits.memory}
    with _turn:
        said, rgb = _run(json.dumps(asked).encode() + b"\n" + data, limits.seconds)
    if "too_large" in said:
        raise ContextExceeded("the pictures need more tokens than the context has; send fewer or smaller pictures")
    if "wrong" in said:
        raise RequestError(f"a picture cannot be used: {said['wrong']}")
    width, height = said["size"]
    return np.frombuffer(rgb, np.uint8).reshape(height, width, 3)


def _run(question: bytes, seconds: int) -> tuple[dict[str, Any], bytes]:
    """Return the answer of a new process, or an error that says how the process ended."""
    command = [sys.executable, *_COMMAND]
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=2 * seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"wrong": f"decoding takes more than {seconds} seconds"}, b""
    line, _, rgb = done.stdout.partition(b"\n")
    if done.returncode < 0:
        return {"wrong": f"its decoder was ended (signal {-done.returncode}), by its own limits or a fault"}, b""
    with contextlib.suppress(ValueError):
        said = json.loads(line)
        if not done.returncode and ("size" not in said or len(rgb) == 3 * math.prod(said["size"])):
            return said, rgb
    return {"wrong": "its decoder failed"}, b""
