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

from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.wire_codec import NONE, bytes_per_row, is_faster

_LATENCIES = 20  # the least that a chunk should take, so that latency is a twentieth of it
_MOST_ROWS = 4096  # no chunk has more


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
class Choice:
    """A codec, and the seconds that a prompt's token takes with it and without."""

    codec: str
    seconds: float
    seconds_plain: float


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """Advice on one link.

    ``token_seconds``: what the link adds to a generated token. ``row_seconds``: sending is hidden where a stage takes
    longer than that to compute a prompt's token. ``chunk_seconds``: what a chunk should take a stage at least.
    ``chunk_rows``: tokens whose bytes alone take as long; ``None``: more than a chunk has.
    """

    token_seconds: float
    row_seconds: float
    chunk_seconds: float
    chunk_rows: int | None
    choice: Choice


def advise(figures: LinkMeasurement, hidden: Hidden, codecs: Sequence[Codec]) -> LinkAdvice:
    """Advice on a link that carries hidden states in the ``down`` direction of ``figures``."""
    choice = choose(figures.down, hidden, codecs)
    chunk = _LATENCIES * figures.latency_p50
    return LinkAdvice(figures.seconds(hidden.num_bytes), choice.seconds, chunk, rows_of(chunk, choice.seconds), choice)


def choose(bandwidth: float, hidden: Hidden, codecs: Sequence[Codec]) -> Choice:
    """The fastest codec for a row, "none" unless another is clearly faster. ``bandwidth``: bytes a second.

    >>> hidden = Hidden(4096, "bfloat16", "")
    >>> choose(1e8, hidden, [Codec("int8", 4096, 4e-6)])
    Choice(codec='int8', seconds=4.496e-05, seconds_plain=8.192e-05)
    >>> choose(1e10, hidden, [Codec("int8", 4096, 4e-6)]).codec
    'none'
    """
    plain = hidden.num_bytes / bandwidth
    best = Choice(NONE, plain, plain)
    for codec in codecs:
        seconds = codec.num_bytes / bandwidth + codec.seconds
        if is_faster(hidden.num_bytes, codec.num_bytes, bandwidth, codec.seconds) and seconds < best.seconds:
            best = Choice(codec.name, seconds, plain)
    return best


def rows_of(seconds: float, row_seconds: float) -> int | None:
    """The number of rows that take ``seconds`` to send; ``None``: more than a chunk has."""
    if row_seconds * _MOST_ROWS < seconds or row_seconds <= 0:
        return None
    return max(math.ceil(seconds / row_seconds), 1)


def pipeline_seconds(ways: Sequence[LinkAdvice], back: float) -> float:
    """Seconds that the links add to a generated token: every hop down, and the result's way back."""
    return sum(way.token_seconds for way in ways) + back
