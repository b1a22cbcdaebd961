"""Measures codecs on rows alone: bytes, seconds, and errors, also where a few values are massive.

In the residual stream of trained models some channels are always large, and a few values enormous: 1e2 to 1e3 in many,
7e5 in Gemma 3 (arXiv 2605.15572). Rows like those are made here. Errors are given over all values, and over the *usual*
ones, which are not massive: a codec may preserve the large values and lose all others.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import CODECS, FP16, NONE, bytes_per_row
from splitinfer.engine.links.codecs import seconds_per_row
from splitinfer.models.codecs import pack, unpack

WIDTH = 4096
_ROWS = 256
_LARGE = (7, 1500, 3000)  # channels that are always large
_SPIKE = 42  # the channel of the enormous value
_DTYPE = "bfloat16"


def measure_rows() -> dict[str, Any]:
    """The figures of every codec, for the document."""
    kinds = {"ordinary": _rows(), "spike 2e3": _rows(50, 2e3), "spike 3e5": _rows(500, 3e5)}
    halves = bytes_per_row(FP16, WIDTH, _DTYPE)
    codecs = {}
    for codec in (NONE, *CODECS):
        size = bytes_per_row(codec, WIDTH, _DTYPE)
        codecs[codec] = {
            "bytes_per_row": size,
            "to_fp16": size / halves,
            "seconds_per_row": 0.0 if codec == NONE else seconds_per_row(codec, TensorSpec(_DTYPE, (WIDTH,)), _ROWS),
            "off": {kind: _off(codec, rows) for kind, rows in kinds.items()},
        }
    return {"width": WIDTH, "dtype": _DTYPE, "kinds": list(kinds), "codecs": codecs}


def _rows(large: float = 1.0, spike: float = 0.0) -> mx.array:
    rows = mx.random.normal((_ROWS, WIDTH), key=mx.random.key(3))
    for channel in _LARGE:
        rows[:, channel] *= large
    rows[:, _SPIKE] += spike
    return rows.astype(mx.bfloat16)


def _off(codec: str, rows: mx.array) -> dict[str, float]:
    """``fit``: the share of rows that can be packed; ``all``, ``usual``: root mean square errors of those, relative."""
    if codec == NONE:
        return {"fit": 1.0, "all": 0.0, "usual": 0.0}
    fits, packed = pack(codec, rows)
    fitting = np.flatnonzero(np.array(fits))
    if not len(fitting):
        return {"fit": 0.0, "all": 0.0, "usual": 0.0}
    back = np.array(unpack(codec, packed, mx.float32))[fitting]
    was = np.array(rows.astype(mx.float32))[fitting]
    usual = np.setdiff1d(np.arange(WIDTH), (*_LARGE, _SPIKE))
    return {
        "fit": len(fitting) / _ROWS,
        "all": _relative(back, was),
        "usual": _relative(back[:, usual], was[:, usual]),
    }


def _relative(back: np.ndarray, was: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(back - was))) / float(np.mean(np.square(was))))
