"""Tables of a speculation benchmark's document. Pure."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from splitinfer.bench.speculation.report import IN_FLIGHT, SEQUENTIAL

_PLACES = 8


def speculation_tables(found: Mapping[str, Any]) -> list[Table]:
    """One table each for speeds by case, acceptance by place, theory, cuts, and links."""
    return [_speeds(found), _places(found), _theory(found), _cuts(found), _links(found)]


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


def _theory(found: Mapping[str, Any]) -> Table:
    table = Table(
        "in flight", "measured", "expected", "share of it", "limit", "blocks: first, further, in flight",
        title=f"Beside theory: a draft takes {found['draft_ms']:.3g} ms ({100 * found['draft_share_of_a_step']:.1f} % "
        f"of a step), a link {found['link_ms']:.2g} ms one way", title_justify="left",
    )  # fmt: skip
    for case in found["cases"]:
        theory = case.get("in_flight")
        if theory:
            flight = theory["flight"]
            table.add_row(
                case["case"],
                range_of(case["systems"][IN_FLIGHT]["speed_up"]),
                f"{theory['expected_speed_up']['median']:.2f}",
                range_of(theory["share_of_expected"]),
                f"{theory['limit_speed_up']['median']:.2f}",
                f"{flight['first']}, {flight['further']}, {flight['in_flight']}",
            )
    for point in found["gpu_like"]:
        table.add_row(
            f"expected at {point['acceptance']:g} if a row more took 25 % of a step", "", f"{point['in_flight']:.2f}"
        )
    if found["teacher_forced"]:
        teacher = found["teacher_forced"]
        table.caption = (
            f"On {teacher['positions']:,} tokens of {teacher['text']} draft and model agree at "
            f"{100 * teacher['greedy']:.1f} % greedily, {100 * teacher['sampled']:.1f} % sampling with the same noise"
        )
    return table


def _cuts(found: Mapping[str, Any]) -> Table:
    table = Table("the best cut for", "layers", "expected tokens/s", title="Where to cut", title_justify="left")
    cuts = found["best_cuts"]
    if not cuts:
        return table
    for name, words in (("sequential", "one stream, no drafts"), ("pipelined", "eight streams")):
        table.add_row(words, _layers(cuts[name]), f"{cuts[name]['tokens_per_second']:.3g}")
    for acceptance, cut in cuts["speculative"].items():
        table.add_row(f"one stream, drafts right at {acceptance}", _layers(cut), f"{cut['tokens_per_second']:.3g}")
    return table


def _links(found: Mapping[str, Any]) -> Table:
    first = found["links"][0]["speed_up"]
    table = Table(
        "expected with a link like", "tokens/s, no drafts", *(f"in flight (synchronous) at {a}" for a in first),
        title="What the link does", title_justify="left",
    )  # fmt: skip
    for link in found["links"]:
        cells = [f"{p['in_flight']:.2f} ({p['synchronous']:.2f})" for p in link["speed_up"].values()]
        table.add_row(f"{link['link']} ({1000 * link['seconds']:.2g} ms)", f"{link['sequential']:.3g}", *cells)
    return table


def range_of(summary: Mapping[str, Any]) -> str:
    """A median with the least and the greatest value."""
    return f"{summary['median']:.2f} ({summary['low']:.2f} to {summary['high']:.2f})"


def _layers(cut: Mapping[str, Any]) -> str:
    return "+".join(map(str, cut["layers"]))
