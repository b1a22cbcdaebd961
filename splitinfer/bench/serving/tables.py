"""Tables of a serving benchmark's document. Pure."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table


def serve_tables(found: Mapping[str, Any]) -> list[Table]:
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
