"""``splitinfer simulate``: runs the search and shows what it found as tables. Nothing is measured here."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from splitinfer.bench.shared.printing import print_found
from splitinfer.sim.search import Search, search

_WIDTH = 130


def run_simulation(asked: Search, *, as_json: bool) -> int:
    """Search, print tables and, as the last line, the document; return the exit code."""
    found = search(asked)
    print_found(found, _tables(found), as_json=as_json, least_width=_WIDTH)
    return 0


def _tables(found: Mapping[str, Any]) -> list[Table]:
    title = (
        f"{found['requests']} requests ({found['mean_prompt_tokens']:,.0f} tokens of prompt, "
        f"{found['mean_answer_tokens']:,.0f} of answer), at most {found['max_running']} at once; "
        f"a usual gap is {1000 * found['gap']:.1f} ms"
    )
    tables = []
    if any(case["rates"] for case in found["cases"]):
        tables.append(_by_rate(found, title))
    if any(case["capacity"] for case in found["cases"]):
        tables.append(_by_capacity(found, title))
    return tables


def _by_rate(found: Mapping[str, Any], title: str) -> Table:
    table = Table(
        "cut", "policy", "budget", "a second", "TTFT p50", "p99", "ITL p50", "p99", "longest", "delay p50", "tokens/s",
        title=title, title_justify="left",
    )  # fmt: skip
    for case in found["cases"]:
        for each in case["rates"]:
            rate = "as recorded" if each["rate"] is None else f"{each['rate']:.3g}"
            table.add_row(*_name(case), rate, *_figures(each))
    return table


def _by_capacity(found: Mapping[str, Any], title: str) -> Table:
    table = Table(
        "cut", "policy", "budget", "objective", "capacity, a second", "TTFT p50", "p99", "ITL p50", "p99", "longest",
        "delay p50", "tokens/s", title=title, title_justify="left",
    )  # fmt: skip
    for case in found["cases"]:
        for each in case["capacity"]:
            rate = each["rate"]
            figures = _figures(each) if rate else []
            table.add_row(*_name(case), f"{each['objective']:g} gaps", f"{rate:.3g}" if rate else "never", *figures)
    return table


def _name(case: Mapping[str, Any]) -> tuple[str, str, str]:
    return case["cut"], case["policy"], str(case["token_budget"])


def _figures(each: Mapping[str, Any]) -> list[str]:
    times = (
        each["ttft"]["p50"], each["ttft"]["p99"], each["itl"]["p50"], each["itl"]["p99"], each["itl"]["max"],
        each["delay"]["p50"],
    )  # fmt: skip
    return [*(f"{1000 * seconds:,.0f} ms" for seconds in times), f"{each['tokens_per_second']:,.1f}"]
