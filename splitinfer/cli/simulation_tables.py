"""``splitinfer simulate``: runs the search and shows what it found as tables. Nothing is measured here."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from splitinfer.bench.shared.printing import print_found
from splitinfer.sim.search import Search, search

_WIDTH = 130
_FIGURES = ("TTFT p50", "p99", "ITL p50", "p99", "longest", "delay p50", "tokens/s")


def run_simulation(asked: Search, *, as_json: bool) -> int:
    """Search, print tables and, as the last line, the document; return the exit code."""
    found = search(asked)
    print_found(found, _tables(found), as_json=as_json, least_width=_WIDTH)
    return 0


def _tables(found: Mapping[str, Any]) -> list[Table]:
    """A table of the rates and one of the capacities, as far as there are any."""
    title = (
        f"{found['requests']} requests ({found['mean_prompt_tokens']:,.0f} tokens of prompt, "
        f"{found['mean_answer_tokens']:,.0f} of answer), at most {found['max_running']} at once; "
        f"a usual gap is {1000 * found['gap']:.1f} ms"
    )
    tables = []
    for key, columns in (("rates", ("a second",)), ("capacity", ("objective", "capacity, a second"))):
        table = Table("cut", "policy", "budget", *columns, *_FIGURES, title=title, title_justify="left")
        for case in found["cases"]:
            for each in case[key]:
                table.add_row(case["cut"], case["policy"], str(case["token_budget"]), *_rate(each), *_figures(each))
        tables += [table] if table.rows else []
    return tables


def _rate(each: Mapping[str, Any]) -> tuple[str, ...]:
    if "objective" not in each:
        return ("as recorded" if each["rate"] is None else f"{each['rate']:.3g}",)
    return f"{each['objective']:g} gaps", f"{each['rate']:.3g}" if each["rate"] else "never"


def _figures(each: Mapping[str, Any]) -> list[str]:
    if "ttft" not in each:  # an objective that is never met
        return []
    ttft, itl = each["ttft"], each["itl"]
    times = ttft["p50"], ttft["p99"], itl["p50"], itl["p99"], itl["max"], each["delay"]["p50"]
    return [*(f"{1000 * seconds:,.0f} ms" for seconds in times), f"{each['tokens_per_second']:,.1f}"]
