"""Tables and a plot of a serving benchmark's document: what a long prompt does to decoding streams, what policies do to
requests that arrive at random, and what ``prefill_share`` does to both."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table each for the long prompt, for random arrivals, and for the values of ``prefill_share``."""
    return [_stalls(found), _arrivals(found), *([_dial(found)] if found["dial"] else [])]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _stalls(found: Mapping[str, Any]) -> Table:
    stall = found["stall"]
    trials = stall["trials"]
    objective = statistics.median(trial["objective"] for trial in trials)
    table = Table(
        "", "gap before", "gap p50", "p99", "longest", "p99 / objective", "longest / objective", "TTFT of the prompt",
        title=f"{stall['streams']} streams decode, a prompt of {stall['prompt_tokens']:,} tokens arrives "
        f"(objective {_ms(objective)}; medians of {len(trials)})",
        title_justify="left",
    )  # fmt: skip
    for name in trials[0]["systems"]:
        each = [trial["systems"][name] for trial in trials]
        table.add_row(
            name,
            *(_ms(statistics.median(value)) for value in (
                [one["usual_gap"] for one in each], *([one["itl"][at] for one in each] for at in ("p50", "p99", "max"))
            )),
            _with_range([one["p99_to_objective"] for one in each]),
            _with_range([one["max_to_objective"] for one in each]),
            _ms(statistics.median(one["ttft"] for one in each)),
        )  # fmt: skip
    return table


def _with_range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _arrivals(found: Mapping[str, Any]) -> Table:
    table = _table_of_points(
        f"{found['requests']} requests, {found['rate']:.3g} a second ({found['mean_prompt_tokens']:,.0f} tokens of "
        f"prompt, {found['mean_answer_tokens']:,.0f} of answer), stalled: over {_ms(found['objective'])}"
    )
    for point in found["arrivals"]:
        _add(table, point["name"], point)
    return table


def _dial(found: Mapping[str, Any]) -> Table:
    table = _table_of_points("stall_free at values of prefill_share, the same requests")
    for point in found["dial"]:
        _add(table, f"{point['prefill_share']:g}", point)
    return table


def _table_of_points(title: str) -> Table:
    return Table(
        "", "TTFT p50", "p99", "ITL p50", "p99", "longest", "stalled", "delay p50", "tokens/s",
        "simulated / live: tokens/s, TTFT p50, ITL p50, p99", title=title, title_justify="left",
    )  # fmt: skip


def _add(table: Table, name: str, point: Mapping[str, Any]) -> None:
    live, compared = point["live"], point.get("simulated_to_live")
    is_known = live["delay"]["max"] > 0
    table.add_row(
        name,
        *(_ms(live["ttft"][at]) for at in ("p50", "p99")),
        *(_ms(live["itl"][at]) for at in ("p50", "p99", "max")),
        f"{100 * live['stalled']:.1f} %",
        _ms(live["delay"]["p50"]) if is_known else "",
        f"{live['tokens_per_second']:.1f}",
        ", ".join(f"{value:.2f}" for value in compared.values()) if compared else "",
    )


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _plot_stall(left, found)
    _plot_dial(right, found)
    figure.savefig(path, dpi=150)


def _plot_stall(axes: Any, found: Mapping[str, Any]) -> None:
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


def _plot_dial(axes: Any, found: Mapping[str, Any]) -> None:
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
