"""Plots a serving benchmark: what a long prompt does to decoding streams, and what ``prefill_share`` does to both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_serving(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _stall(left, found)
    _dial(right, found)
    figure.savefig(path, dpi=150)


def _stall(axes: Any, found: Mapping[str, Any]) -> None:
    trial = found["stall"]["trials"][0]
    for name, each in trial["systems"].items():
        ends = [end - each["came"] for end, _ in each["gaps"]]
        lengths = [gap for _, gap in each["gaps"]]
        axes.plot(ends, lengths, marker=".", markersize=3, linewidth=0.6, label=f"{name} (TTFT {each['ttft']:.1f} s)")
    axes.axhline(trial["objective"], color="0.4", linestyle="--", linewidth=1, label="objective")
    axes.axvline(0.0, color="0.8", linewidth=1)
    axes.set(
        yscale="log", xlabel="seconds since the long prompt came", ylabel="seconds between two tokens of a stream",
        title=f"{found['stall']['streams']} streams, a prompt of {found['stall']['prompt_tokens']:,} tokens",
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _dial(axes: Any, found: Mapping[str, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    points = found["dial"]
    for kind, style in (("live", "o-"), ("simulated", "x:")):
        xs = [point[kind]["ttft"]["p50"] for point in points]
        ys = [point[kind]["itl"]["p99"] for point in points]
        axes.plot(xs, ys, style, label=f"prefill_share, {kind}")
    for point in points:
        at = (point["live"]["ttft"]["p50"], point["live"]["itl"]["p99"])
        axes.annotate(f"{point['prefill_share']:g}", at, textcoords="offset points", xytext=(6, 4), fontsize=9)
    for point in found["arrivals"]:
        live = point["live"]
        axes.plot(live["ttft"]["p50"], live["itl"]["p99"], "s", markersize=6, label=point["name"])
    axes.set(
        xscale="log", yscale="log", xlabel="TTFT, p50 (s)", ylabel="time between tokens, p99 (s)",
        title=f"{found['requests']} requests, {found['rate']:.2g} a second",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8)
