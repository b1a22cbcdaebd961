"""Tables of drafts for several streams. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_LIVE = "drafts"


def several_tables(found: Mapping[str, Any]) -> list[Table]:
    """One table of equal acceptance, one of streams that differ, one of requests that come and go."""
    tables = [_cases(found, found["cases"], "Drafts for several"), _each(found["mixed"])]
    return [*tables, _visits(found["come_and_go"])] if found["come_and_go"] else tables


def _cases(found: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    cut = "+".join(map(str, found["layout"]["layers"]))
    table = Table(
        "acceptance", "streams", "tokens/s", "gain", "to the best without", "computed optimum", "share of it",
        "s a token, p99", "gap p99", "longest gap", "groups, drafts", "same tokens",
        title=f"{title}, {found['layout']['name']} ({cut} layers); ratios are to no drafts in as many groups as stages",
        title_justify="left",
    )  # fmt: skip
    for case in cases:
        live, best = case["systems"][_LIVE], case["optimum"]
        choice = live["choice"]
        table.add_row(
            f"{case['acceptance'][0]:g}",
            str(len(case["acceptance"])),
            f"{live['tokens_per_second']:.4g}",
            f"{live['gain']:.2f}",
            f"{case['to_best_without']:.2f}",
            "" if best is None else f"{best['gain']:.2f} ({best['groups']} x {best['drafts']}, {best['in_flight']})",
            "" if best is None else f"{live['gain'] / best['gain']:.2f}",
            f"{live['seconds_a_token_p99_to_today']:.2f}",
            f"{live['gap_p99_to_today']:.2f}",
            f"{live['longest_gap_to_today']:.2f}",
            f"{choice['groups']}, {_spread(choice['drafts'])}",
            "yes" if case["same_tokens"] else "[bold red]no[/bold red]",
        )
    return table


def _each(cases: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "acceptance of each stream", "speed of each, to no drafts", "of all", "longest gap", "same tokens",
        title="Streams that differ", title_justify="left",
    )  # fmt: skip
    for case in cases:
        live = case["systems"][_LIVE]
        table.add_row(
            ", ".join(f"{a:g}" for a in case["acceptance"]),
            ", ".join(f"{gain:.2f}" for gain in live["gains"]),
            f"{live['gain']:.2f}",
            f"{live['longest_gap_to_today']:.2f}",
            "yes" if case["same_tokens"] else "[bold red]no[/bold red]",
        )
    return table


def _visits(found: Mapping[str, Any]) -> Table:
    table = Table(
        "system", "tokens/s", title=f"Requests that come and go for {found['seconds']:g} s, acceptance "
        f"{found['acceptance']:g}: drafts to none {found['to_none']:.2f}, to the best fixed choice "
        f"{found['to_best_fixed']:.2f}", title_justify="left",
    )  # fmt: skip
    for name, rate in found["tokens_per_second"].items():
        table.add_row(name, f"{rate:.4g}")
    return table


def _spread(drafts: Sequence[int] | None) -> str:
    if not drafts:
        return ""
    return str(drafts[0]) if len(set(drafts)) == 1 else f"{min(drafts)} to {max(drafts)}"
