"""Plots speed-up against acceptance: measured, expected, and the limit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LEAST, _MOST = 0.9, 8.0  # of the speed-ups shown; the limit has none


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot, in the format of the path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), layout="constrained")
    axes = figure.subplots()
    points = found["curve"]
    xs = [point["acceptance"] for point in points]
    axes.plot(
        xs, [point["limit"] for point in points], color="0.55", linestyle=":", label="limit of any chain of drafts"
    )
    axes.plot(xs, [point["in_flight"] for point in points], color="tab:blue", label="in flight, expected")
    axes.plot(
        xs,
        [point["synchronous"] for point in points],
        color="tab:orange",
        linestyle="--",
        label="synchronous, expected",
    )
    for name, color, marker in (("in flight", "tab:blue", "o"), ("synchronous", "tab:orange", "s")):
        seen = [_point(case, name) for case in found["cases"]]
        shown = [point for point in seen if point is not None]
        if shown:
            a, median, low, high = zip(*shown, strict=True)
            errors = [
                [m - x for m, x in zip(median, low, strict=True)],
                [x - m for m, x in zip(median, high, strict=True)],
            ]
            axes.errorbar(a, median, errors, fmt=marker, color=color, capsize=3, label=f"{name}, measured")
    axes.axhline(1.0, color="0.8", linewidth=0.8)
    top = max([point["in_flight"] for point in points if point["acceptance"] <= 0.95] + [2.0])
    axes.set(
        xlabel="share of drafts that are right", ylabel="tokens per second, to the same stages without drafts",
        xlim=(0, 1), ylim=(_LEAST - 0.2, min(_MOST, 1.25 * top)),
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
