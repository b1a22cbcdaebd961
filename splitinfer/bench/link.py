"""``splitinfer bench --mode link``: what links cost over the sockets below them.

Two processes on this machine for each kind of link exchange round trips of 4 KB, the size of a generated token, and of
4 MB, the size of a prompt's chunk, beside the same over bare ZeroMQ. All pairs are connected from the start and take
turns trial by trial, so ratios are of the same moments. An idle pair shows what heartbeats cost.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.link_pair import BARE, Kind, Pair
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import range_of, say
from splitinfer.errors import PeerError
from transports import known

SIZES = {"4 KB": (4096, 1000), "4 MB": (4 * 2**20, 40)}  # bytes, and rounds in a trial
MOST_ROUND, LEAST_BANDWIDTH = 1.6, 0.7  # goals for tcp, 4 KB and 4 MB, relative to bare ZeroMQ
_IDLE_SECONDS = 10.0


def kinds() -> list[Kind]:
    """Bare ZeroMQ first, then all kinds of link that this installation has."""
    found = [
        Kind("bare ZeroMQ", BARE),
        Kind("tcp", "tcp://127.0.0.1:0"),
        Kind("tcp, payloads checked", "tcp://127.0.0.1:0", checksum=True),
        Kind("tcp, encrypted", "tcp://127.0.0.1:0", curve=True),
    ]
    if "rdma" in known():
        found.append(Kind("rdma, ring", "rdma://127.0.0.1:0?backend=ring"))
    return found


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        PeerError: ZeroMQ itself, or tcp, cannot be measured here.
    """
    on = machine.describe()
    with _pairs(kinds()) as (pairs, left_out):
        times: dict[str, dict[str, list[list[float]]]] = {
            pair.kind.name: {size: [] for size in SIZES} for pair in pairs
        }
        for trial in range(options.trials):
            say(f"trial {trial + 1} of {options.trials}")
            for size, (num_bytes, rounds) in SIZES.items():
                for pair in pairs:
                    times[pair.kind.name][size].append(sorted(pair.round_trips(num_bytes, rounds)))
        idle = _idle_shares(pairs)
    bare = pairs[0].kind.name
    return {
        "measured_on": on,
        "trials": options.trials,
        "left_out": left_out,
        "links": {
            name: {
                **{size: _figures(trials, times[bare][size], SIZES[size][0]) for size, trials in by_size.items()},
                "idle_share": idle[name],
            }
            for name, by_size in times.items()
        },
    }


def _idle_shares(pairs: Sequence[Pair]) -> dict[str, float]:
    """The share of a processor that each end takes while idle; all at once, in ticks of a hundredth of a second."""
    say(f"idle for {_IDLE_SECONDS:g} s")
    began, before = time.monotonic(), [pair.processor_seconds() for pair in pairs]
    time.sleep(_IDLE_SECONDS)
    took = time.monotonic() - began
    return {
        pair.kind.name: (pair.processor_seconds() - spent) / took for pair, spent in zip(pairs, before, strict=True)
    }


@contextmanager
def _pairs(wanted: Sequence[Kind]) -> Iterator[tuple[list[Pair], dict[str, str]]]:
    """The pairs that can be connected, and by name why the others cannot. The first two are required."""
    made, left_out = list[Pair](), dict[str, str]()
    try:
        for i, kind in enumerate(wanted):
            try:
                made.append(Pair(kind))
            except PeerError as error:
                if i < 2:
                    raise
                left_out[kind.name] = str(error)
        yield made, left_out
    finally:
        for pair in made:
            pair.close()


def _figures(trials: Sequence[Sequence[float]], bare: Sequence[Sequence[float]], num_bytes: int) -> dict[str, Any]:
    """Figures of round trips: for each trial, their seconds in ascending order."""
    p50, p99, bare_p50 = (_at(trials, 0.5), _at(trials, 0.99), _at(bare, 0.5))
    return {
        "p50": summarize(p50),
        "p99": summarize(p99),
        "bytes_per_second": summarize([2 * num_bytes / seconds for seconds in p50]),
        "p50_to_bare": ratios(p50, bare_p50),
        "bandwidth_to_bare": ratios(bare_p50, p50),
    }


def _at(trials: Sequence[Sequence[float]], share: float) -> list[float]:
    return [times[math.ceil(share * len(times)) - 1] for times in trials]


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """A table of all links, and what comes of the goals."""
    table = Table(
        "", "4 KB p50, µs", "p99", "to bare", "4 MB p50, ms", "p99", "GB/s", "bandwidth to bare", "idle, %",
        title="Round trips between two processes of this machine", title_justify="left",
    )  # fmt: skip
    for name, link in found["links"].items():
        small, large = link["4 KB"], link["4 MB"]
        table.add_row(
            name, f"{small['p50']['median'] * 1e6:.1f}", f"{small['p99']['median'] * 1e6:.0f}",
            range_of(small["p50_to_bare"]), f"{large['p50']['median'] * 1e3:.2f}",
            f"{large['p99']['median'] * 1e3:.2f}", f"{large['bytes_per_second']['median'] / 1e9:.2f}",
            range_of(large["bandwidth_to_bare"]), f"{100 * link['idle_share']:.2f}",
        )  # fmt: skip
    return [table, *_notes(found)]


def _notes(found: Mapping[str, Any]) -> list[str]:
    ours = found["links"]["tcp"]
    small, large = ours["4 KB"]["p50_to_bare"]["median"], ours["4 MB"]["bandwidth_to_bare"]["median"]
    notes = [
        f"tcp, 4 KB: {small:.2f} of the bare round trip, wanted is {MOST_ROUND} at most: {_met(small <= MOST_ROUND)}",
        f"tcp, 4 MB: {large:.2f} of the bare bandwidth, wanted is {LEAST_BANDWIDTH} at least: "
        f"{_met(large >= LEAST_BANDWIDTH)}",
    ]
    return notes + [f"left out: {why}" for why in found["left_out"].values()]


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"
