"""``splitinfer bench --mode link``: what links cost over the sockets below them.

This process and another one for each kind of link run the probe that ``plan`` and ``doctor`` run on real links
(``engine.links.probe``), beside the same over bare ZeroMQ. All are connected from the start and take turns trial by
trial, so ratios are of the same moments.
"""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from splitinfer.bench import machine
from splitinfer.bench.figures import ratios, summarize
from splitinfer.bench.link_pair import BARE, Kind, Pair
from splitinfer.bench.options import Options
from splitinfer.bench.report import range_of
from splitinfer.console import say
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.errors import PeerError
from splitinfer.probes.machine import describe
from transports import known

PROBES = 20  # in a trial


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
    on = describe()
    for processor in machine.free_processors()[:1]:
        machine.pin(os.getpid(), processor)
    with _pairs(kinds()) as (pairs, left_out):
        trials: dict[str, list[LinkMeasurement]] = {pair.kind.name: [] for pair in pairs}
        for trial in range(options.trials):
            say(f"trial {trial + 1} of {options.trials}")
            for pair in pairs:
                trials[pair.kind.name].append(_median(pair.probe(PROBES)))
    bare = pairs[0].kind.name
    return {
        "measured_on": on,
        "trials": options.trials,
        "left_out": left_out,
        "links": {name: _figures(found, trials[bare]) for name, found in trials.items()},
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


def _median(probes: Sequence[LinkMeasurement]) -> LinkMeasurement:
    """The median of each figure."""
    return LinkMeasurement(*(statistics.median(figure) for figure in zip(*map(astuple, probes), strict=True)))


def _figures(trials: Sequence[LinkMeasurement], bare: Sequence[LinkMeasurement]) -> dict[str, Any]:
    """The figures of a link beside those of bare ZeroMQ in the same trials."""
    latencies, theirs = ([each.latency_p50 for each in some] for some in (trials, bare))
    down, down_bare = ([each.down for each in some] for some in (trials, bare))
    return {
        "latency_p50": summarize(latencies),
        "latency_p99": summarize([each.latency_p99 for each in trials]),
        "down": summarize(down),
        "up": summarize([each.up for each in trials]),
        "latency_to_bare": ratios(latencies, theirs),
        "bandwidth_to_bare": ratios(down, down_bare),
    }


def tables(found: Mapping[str, Any]) -> list[RenderableType]:
    """A table of all links."""
    table = Table(
        "", "latency p50, µs", "p99", "to bare", "down, GB/s", "up", "down to bare",
        title="Links between two processes of this machine, one way", title_justify="left",
    )  # fmt: skip
    for name, link in found["links"].items():
        p50, p99, down, up = (link[one]["median"] for one in ("latency_p50", "latency_p99", "down", "up"))
        table.add_row(
            name, f"{p50 * 1e6:.1f}", f"{p99 * 1e6:.0f}", range_of(link["latency_to_bare"]), f"{down / 1e9:.2f}",
            f"{up / 1e9:.2f}", range_of(link["bandwidth_to_bare"]),
        )  # fmt: skip
    return [table, *(f"left out: {why}" for why in found["left_out"].values())]
