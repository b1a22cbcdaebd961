"""Curves of what was held, as a table and as a picture: one strip for each, from 0 to its highest value."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_WIDTH, _HEIGHT, _GAP = 900, 110, 12  # pixels of a strip, and between two
_PAPER, _LINE, _MARK = (247, 247, 245), (63, 127, 191), (210, 150, 150)
_COLUMNS = 6


def table(curves: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """A line for each name, with its median in each sixth of the time."""
    parts = [part for part in np.array_split(np.arange(len(curves)), _COLUMNS) if len(part)]
    lines = [f"{'minutes':<14}" + "".join(f"{curves[part[-1]]['at'] / 60:>16,.1f}" for part in parts)]
    for name in names:
        medians = [float(np.median([curves[i].get(name, 0) for i in part])) for part in parts]
        lines.append(f"{name:<14}" + "".join(f"{value:>16,.0f}" for value in medians))
    return "\n".join(lines)


def paint(path: Path, curves: Sequence[Mapping[str, float]], names: Sequence[str], marks: Sequence[float]) -> None:
    """A PNG of the names' curves, in their order; ``marks``: moments that are vertical lines."""
    picture = np.full((len(names) * (_HEIGHT + _GAP) + _GAP, _WIDTH, 3), 255, np.uint8)
    end = max(one["at"] for one in curves)
    for number, name in enumerate(names):
        strip = picture[(top := _GAP + number * (_HEIGHT + _GAP)) : top + _HEIGHT]
        strip[:] = _PAPER
        for moment in marks:
            strip[:, min(int(moment / end * _WIDTH), _WIDTH - 1)] = _MARK
        values = [one.get(name, 0) for one in curves]
        at = np.linspace(0, end, _WIDTH)
        rows = np.interp(at, [one["at"] for one in curves], values) / (max(values) or 1) * (_HEIGHT - 3)
        before = int(rows[0])
        for x, row in enumerate(rows.astype(int)):
            low, high = sorted((before, row))
            strip[_HEIGHT - 3 - high : _HEIGHT - 1 - low, x] = _LINE
            before = row
    path.write_bytes(_png(picture))


def _png(picture: np.ndarray) -> bytes:
    height, width, _ = picture.shape
    raw = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1).tobytes()
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(raw, 9)),
        (b"IEND", b""),
    ]
    framed = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
