"""Tables of a speculation benchmark's document, and its plot of speed-up against acceptance."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from splitinfer.bench.shared.printing import range_of
from splitinfer.bench.speculation.report import IN_FLIGHT, SEQUENTIAL

_PLACES = 8


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table each for speeds by case and acceptance by place."""
    return [_speeds(found), _places(found)]


def _speeds(found: Mapping[str, Any]) -> Table:
    cut = "+".join(map(str, found["layout"]["layers"]))
    table = Table(
        "", "tokens/s", "speed-up", "acceptance", "drafts sent a token", "thrown away", "same tokens",
        title=f"Speculation, {found['layout']['name']} ({cut} layers), drafts by {found['drafter']}",
        title_justify="left",
    )  # fmt: skip
    for case in found["cases"]:
        table.add_section()
        table.add_row(f"[bold]{case['case']}[/bold]")
        for name, each in case["systems"].items():
            drafts = name != SEQUENTIAL and each["drafts_sent_per_token"]
            table.add_row(
                f"  {name}",
                f"{each['tokens_per_second']['median']:.3g}",
                range_of(each["speed_up"]),
                f"{each['acceptance']:.3f}" if drafts else "",
                f"{each['drafts_sent_per_token']:.2f}" if drafts else "",
                f"{100 * each['thrown_away']:.0f} %" if drafts else "",
                f"{each['same_tokens']} of {each['of']}",
            )
        if "in_flight_to_best_synchronous" in case:
            best = case["best_synchronous"]
            table.add_row(f"  in flight to {best}", "", range_of(case["in_flight_to_best_synchronous"]))
    crowd = found["crowd"]
    table.add_section()
    table.add_row(f"{crowd['requests']} requests at once, to no drafts", "", range_of(crowd["ratio"]))
    return table


def _places(found: Mapping[str, Any]) -> Table:
    table = Table(
        "in flight: share of drafts right", *map(str, range(1, _PLACES + 1)),
        title="Acceptance by place in the block (of how many tried)", title_justify="left",
    )  # fmt: skip
    for case in found["cases"]:
        places = case["systems"].get(IN_FLIGHT, {}).get("by_place", [])
        cells = [f"{right / tried:.2f} ({tried})" if tried else "" for tried, right in places[:_PLACES]]
        table.add_row(case["case"], *cells)
    return table


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    for name, color, marker in (("in flight", "tab:blue", "o"), ("synchronous", "tab:orange", "s")):
        seen = [_point(case, name) for case in found["cases"]]
        shown = [point for point in seen if point is not None]
        if shown:
            a, median, low, high = zip(*shown, strict=True)
            errors = [
                [m - x for m, x in zip(median, low, strict=True)],
                [x - m for m, x in zip(median, high, strict=True)],
            ]
            axes.errorbar(a, median, errors, fmt=marker, color=color, capsize=3, label=name)
    axes.axhline(1.0, color="0.8", linewidth=0.8)
    axes.set(
        xlabel="share of drafts that are right", ylabel="tokens per second, to the same stages without drafts",
        xlim=(0, 1),
        title=f"Speculation in flight: {found['layout']['name']}, {found['drafter']}",
    )  # fmt: skip
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)


def _point(case: Mapping[str, Any], name: str) -> tuple[float, float, float, float] | None:
    """Acceptance, and the median, least and greatest speed-up of a system."""
    of = case["best_synchronous"] if name == "synchronous" and case.get("best_synchronous") else name
    system = case["systems"].get(of)
    if system is None:
        return None
    speed = system["speed_up"]
    acceptance = case["systems"]["in flight"]["acceptance"]
    return acceptance, speed["median"], speed["low"], speed["high"]
