r"""Advice from a link's figures: what a token costs, whether to pack prompts, and how large a chunk should be.

A generated token is one row of hidden states on every link, and a result on the way back: latency decides, and nothing
is packed. A prompt's chunk is many rows: bandwidth decides. For each row

    plain        bytes / bandwidth
    packed       fewer bytes / bandwidth + time to pack and to unpack it

so a codec pays where the link takes longer for the bytes that it saves than the codec takes itself
(``core.wire_codec``). A chunk is sent while the one before it is computed. What a link adds to each of them is its
latency, which is little beside a chunk that takes twenty times as long: to compute, or else to send.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitinfer.core.layout import Layout
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.model_config import positive
from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import CODECS, MOST_WIDTH, NONE, bytes_per_row, is_faster, packs
from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import read_config
from splitinfer.models.hidden_states import seconds_per_row
from splitinfer.models.hub import local_snapshot
from splitinfer.models.memory import on_gpu

_LATENCIES = 20  # the least that a chunk should take, so that latency is a twentieth of it
_MOST_ROWS = 4096  # no chunk has more
_USUAL_WIDTH = 4096  # values of a token, where the model is unknown


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec for rows. ``num_bytes``: of a packed row; ``seconds``: to pack and to unpack it, both ends together."""

    name: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden states of one token: the number of values, their MLX ``dtype``, and where that is known from."""

    values: int
    dtype: str
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return bytes_per_row(NONE, self.values, self.dtype)


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """Advice on one link.

    token_seconds: what the link adds to a generated token.
    codec: the fastest one for prompts, "none" unless another is clearly faster.
    row_seconds, row_seconds_plain: what a prompt's token takes with it and without; sending is hidden where a stage
        takes longer than that to compute it.
    chunk_seconds: what a chunk should take a stage at least. ``chunk_rows``: tokens whose bytes alone take as long;
        ``None``: more than a chunk has.
    """

    token_seconds: float
    codec: str
    row_seconds: float
    row_seconds_plain: float
    chunk_seconds: float
    chunk_rows: int | None


def advise(figures: LinkMeasurement, hidden: Hidden, codecs: Sequence[Codec]) -> LinkAdvice:
    """Advice on a link that carries hidden states in the ``down`` direction of ``figures``.

    >>> hidden = Hidden(4096, "bfloat16", "")
    >>> found = advise(LinkMeasurement(1e-4, 1e-4, down=1e8, up=1e8), hidden, [Codec("int8", 4096, 4e-6)])
    >>> found.codec, found.row_seconds, found.row_seconds_plain
    ('int8', 4.496e-05, 8.192e-05)
    """
    plain = hidden.num_bytes / figures.down
    best, seconds = NONE, plain
    for codec in codecs:
        packed = codec.num_bytes / figures.down + codec.seconds
        if packed < seconds and is_faster(hidden.num_bytes, codec.num_bytes, figures.down, codec.seconds):
            best, seconds = codec.name, packed
    chunk = _LATENCIES * figures.latency_p50
    rows = max(math.ceil(chunk / seconds), 1) if seconds > 0 and seconds * _MOST_ROWS >= chunk else None
    return LinkAdvice(figures.seconds(hidden.num_bytes), best, seconds, plain, chunk, rows)


def hidden_of(layout: Layout) -> Hidden:
    """The hidden states of the layout's model if its configuration is on this machine; else a usual size.

    On a CPU the dtype "auto" is float32; elsewhere it is the model's own, which is nearly always bfloat16.
    """
    dtype = layout.dtype if layout.dtype != "auto" else "bfloat16" if on_gpu() else "float32"
    width = None if layout.model is None else _width(layout.model)
    return Hidden(_USUAL_WIDTH, dtype, "assumed") if width is None else Hidden(width, dtype, str(layout.model))


def codecs_of(hidden: Hidden) -> list[Codec]:
    """The codecs that make such rows smaller, timed here; the other end is assumed to be as fast as this machine."""
    if hidden.values > MOST_WIDTH:
        return []
    row = TensorSpec(hidden.dtype, (hidden.values,))
    return [
        Codec(name, bytes_per_row(name, hidden.values, hidden.dtype), seconds_per_row(name, row))
        for name in CODECS
        if packs(name, hidden.values, hidden.dtype)
    ]


def _width(model: str) -> int | None:
    try:
        path = DEMO_MODELS.get(model) or Path(model).expanduser()
        folder = path if path.is_dir() else local_snapshot(model)
        config = {} if folder is None else read_config(folder)
    except (ModelError, OSError, ValueError, RuntimeError):
        return None
    return positive(config, "hidden_size")
