"""Chooses each link's codec when a pipeline is opened: the layout's, and for ``auto`` the faster one.

The choice stays as long as the pipeline, even when a lost worker comes back on another link: what is computed again
must see the same rounding.
"""

import logging
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import prod

import mlx.core as mx

from splitinfer.core.plan import TensorSpec
from splitinfer.core.wire_codec import AUTO, INT8, NONE, bytes_per_row, choose, is_faster, packs
from splitinfer.models.codecs import pack, unpack
from splitinfer.models.tensors import dtype_of

log = logging.getLogger(__name__)

_ROWS, _TRIALS = 256, 3  # packed and unpacked to see how long it takes


def codecs_of(wanted: Seq[str], rows: Seq[TensorSpec | None], bandwidths: Callable[[], Seq[float]]) -> tuple[str, ...]:
    """The codec of each link, for rows of hidden states like ``rows``. ``bandwidths`` measures the links, in bytes per
    second; it is called only if ``auto`` is among the ``wanted``."""
    if AUTO in wanted:
        wanted = choose(wanted, [_is_worth(*link) for link in zip(wanted, rows, bandwidths(), strict=True)])
    return tuple(_of_use(codec, row) for codec, row in zip(wanted, rows, strict=True))


def _of_use(codec: str, row: TensorSpec | None) -> str:
    """``codec``, or NONE where it would make rows no smaller."""
    if codec == NONE or row is None or packs(codec, prod(row.shape), row.dtype):
        return codec
    log.info("codec %s does not make hidden states of %s smaller; they are sent uncompressed", codec, row.dtype)
    return NONE


def _is_worth(wanted: str, row: TensorSpec | None, bytes_per_second: float) -> bool:
    if wanted != AUTO or row is None:
        return False
    width, plain = prod(row.shape), bytes_per_row(NONE, prod(row.shape), row.dtype)
    packed, seconds = bytes_per_row(INT8, width, row.dtype), seconds_per_row(INT8, row)
    found = is_faster(plain, packed, bytes_per_second, seconds)
    log.info(
        "a link of %.3g MB/s: a row takes %.3g us as it is, %.3g us packed, and packing %.3g us: codec %s",
        bytes_per_second / 1e6, 1e6 * plain / bytes_per_second, 1e6 * packed / bytes_per_second, 1e6 * seconds,
        INT8 if found else NONE,
    )  # fmt: skip
    return found


def seconds_per_row(codec: str, row: TensorSpec, num_rows: int = _ROWS) -> float:
    """Seconds for packing and unpacking a row on this machine, ``num_rows`` at once; the median of some trials."""
    dtype = dtype_of(row.dtype)
    rows = mx.random.normal((num_rows, prod(row.shape))).astype(dtype)
    mx.eval(rows)
    found = []
    for _ in range(_TRIALS + 1):  # the first compiles kernels
        began = time.perf_counter()
        mx.eval(unpack(codec, pack(codec, rows)[1], dtype))
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]) / num_rows
