"""Tables of the document: its medians, and the causes of gaps on the stages. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from splitinfer.bench.speed.report import BASELINE, BASELINE_ALL, BASELINE_BEST, PEERS, PIPELINE, WHOLE

_TITLES = {
    PIPELINE: "pipeline",
    BASELINE: "mlx-lm",
    BASELINE_BEST: "mlx-lm, other step",
    WHOLE: "splitinfer, one stage",
    PEERS: "mlx-lm's pipeline",
}
_BELOW = (BASELINE_ALL,)  # in the caption instead of a column: not limited to one processor for each process


@dataclass(frozen=True, slots=True)
class _Row:
    """``path``: to the figure in each system. ``ratio``: to that of the last column, in the document."""

    label: str
    path: tuple[str, ...] = ()
    ratio: tuple[str, ...] = ()


_CAUSES = ("decode", "ms_per_token_by_cause")


def table(found: Mapping[str, Any]) -> Table:
    """The table of the document's medians, each with its spread."""
    systems = {name: each for name, each in found["systems"].items() if name not in _BELOW}
    against = _against(systems)
    drawn = Table(title=_title(found), caption="\n".join(_caption(found)), caption_justify="left", title_justify="left")
    drawn.add_column("", no_wrap=True)
    for name in systems:
        drawn.add_column(_TITLES.get(name, name), justify="right")
    if against:
        drawn.add_column(f"pipeline / {_TITLES[against]}", justify="right")
    for row in _rows(systems):
        figures = [_at(systems[name], row.path) if row.path else None for name in systems]
        last = [_at(found, row.ratio) if row.ratio else None] if against else []
        if any(figure is not None for figure in (*figures, *last)):
            drawn.add_row(row.label, *map(_cell, (*figures, *last)))
    return drawn


def _rows(systems: Mapping[str, Any]) -> Iterator[_Row]:
    yield from _decode_rows(systems)
    yield from _prefill_rows(systems)
    for n in systems[PIPELINE]["throughput"]:
        yield from _throughput_rows(systems, n)


def _decode_rows(systems: Mapping[str, Any]) -> Iterator[_Row]:
    by_cause = systems[PIPELINE]["decode"]["ms_per_token_by_cause"]
    yield _Row("decode, tokens/s", ("decode", "tokens_per_second"), _ratio(systems, "decode_speed"))
    yield _Row("  physical limit", ("decode", "limit", "tokens_per_second"))
    yield _Row("  ms per token", ("decode", "ms_per_token"))
    for stage in by_cause["compute"]:
        yield _Row(f"  compute on {stage}", (*_CAUSES, "compute", stage))
    yield _Row("  hops", (*_CAUSES, "hops"))
    yield _Row("  host", (*_CAUSES, "host"))
    if by_cause["hops"] is None:
        yield _Row("  hops and host", (*_CAUSES, "hops_and_host"))
    yield _Row("  bytes per token", ("decode", "bytes_per_token"))


def _prefill_rows(systems: Mapping[str, Any]) -> Iterator[_Row]:
    yield _Row("prefill, TTFT in s", ("prefill", "ttft_seconds"), _ratio(systems, "ttft"))
    yield _Row("  physical limit", ("prefill", "limit", "ttft_seconds"))
    yield _Row("  prompt tokens/s", ("prefill", "prompt_tokens_per_second"))
    yield _Row("  bytes per token", ("prefill", "bytes_per_token"))
    for stage in systems[PIPELINE]["prefill"]["busy_percent"]:
        yield _Row(f"  busy % of {stage}", ("prefill", "busy_percent", stage))


def _throughput_rows(systems: Mapping[str, Any], n: str) -> Iterator[_Row]:
    here = ("throughput", n)
    yield _Row(
        f"throughput at {n}, tokens/s", (*here, "tokens_per_second"), _ratio(systems, *here, "tokens_per_second")
    )
    limit = ("systems", PIPELINE, *here, "limit", "ratio")
    yield _Row("  physical limit", (*here, "limit", "tokens_per_second"), limit)
    yield _Row("  sequences", (*here, "sequences"))
    for name, other, words in ((PEERS, PIPELINE, "pipeline"), (BASELINE, WHOLE, "one stage")):
        if name in systems and other in systems:
            pair = ("ratios", f"{other}/{name}", *here, "tokens_per_second")
            yield _Row(f"  {words} / {_TITLES[name]}", ratio=pair)
    yield _Row("  ITL in ms, median", (*here, "itl_ms", "p50"), _ratio(systems, *here, "itl"))
    yield _Row("  ITL in ms, 99 %", (*here, "itl_ms", "p99"))
    yield _Row("  TTFT of the last in s", (*here, "last_ttft_seconds"))
    yield _Row("  all of it in s", (*here, "seconds"))
    for system in (PIPELINE, WHOLE):
        for stage in _at(systems.get(system), (*here, "step_ms")) or ():
            yield _Row(f"  ms a step on {stage}", (*here, "step_ms", stage))
            yield _Row(f"  duty % of {stage}", (*here, "duty_percent", stage))
            yield _Row(f"  goodput duty % of {stage}", (*here, "goodput_duty_percent", stage))


def gap_tables(found: Mapping[str, Any]) -> list[Table]:
    """For each throughput of the pipeline, a table of the causes for which each stage was idle."""
    throughputs: Mapping[str, Any] = found["systems"][PIPELINE]["throughput"]
    return [_gap_table(n, figures["gaps"]) for n, figures in throughputs.items() if "gaps" in figures]


def _gap_table(n: str, gaps: Mapping[str, Any]) -> Table:
    drawn = Table(title=f"throughput at {n}: what the pipeline's stages stood still for", title_justify="left")
    for heading in ("stage", "cause"):
        drawn.add_column(heading)
    drawn.add_column("% of the time", justify="right")
    for stage, by_cause in gaps.items():
        for cause, figures in by_cause.items():
            if figures["percent"]["high"] > 0:
                drawn.add_row(stage, cause.replace("_", " "), _cell(figures["percent"]))
    return drawn


def _against(systems: Mapping[str, Any]) -> str | None:
    return next((name for name in (BASELINE, WHOLE) if name in systems), None)


def _ratio(systems: Mapping[str, Any], *path: str) -> tuple[str, ...]:
    """The path of a ratio of the last column. For the long prompt it is to mlx-lm at its faster step size, because the
    one that was tried out as best may have been so by chance."""
    other = _against(systems)
    if path == ("ttft",) and BASELINE_BEST in systems:
        other = min((BASELINE, BASELINE_BEST), key=lambda name: systems[name]["prefill"]["ttft_seconds"]["median"])
    return ("ratios", f"{PIPELINE}/{other}", *path)


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = None if value is None else value.get(key)
    return value


def _cell(figure: Mapping[str, Any] | int | None) -> str:
    if figure is None:
        return ""
    if isinstance(figure, int):
        return f"{figure:,}"
    spread = f" ±{figure['spread_percent'] / 2:.1f}%" if len(figure["values"]) > 1 else ""
    return _number(figure["median"]) + spread


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _title(found: Mapping[str, Any]) -> str:
    model, work = found["model"], found["workload"]
    return (
        f"{model['name']}, {model['dtype']}, cut {' + '.join(str(s['layers']) for s in found['layout']['stages'])}; "
        f"{work['trials']} trials, prompt of {work['prompt_tokens']:,}, {work['decode_tokens']} tokens decoded"
    )


def _limits(pipeline: Mapping[str, Any]) -> Iterator[str]:
    """The physical limits as sentences."""
    prefill = pipeline["prefill"]["limit"]
    chunks, stages = prefill["chunks"], prefill["stages"]
    yield "limit of decoding: the stages' computing, one after the other, so at best 1 of one machine's speed"
    yield (
        f"limit of TTFT: ({chunks} + {stages} - 1) / ({chunks} x {stages}) = {prefill['share_of_one_stage']:.3g} of "
        f"their computing added up, for {chunks} chunks on {stages} equal stages"
    )
    for n, figures in pipeline["throughput"].items():
        steps = [step["median"] for step in figures["step_ms"].values()]
        yield (
            f"limit of throughput at {n}: ({' + '.join(map(_number, steps))}) / {_number(max(steps))} ms, what a step "
            f"computes on all stages by the slowest stage's: at best {figures['limit']['ratio']['median']:.3g} of the "
            "same stages one after the other"
        )


def _caption(found: Mapping[str, Any]) -> list[str]:
    on = found["measured_on"]
    pinned = ", ".join(f"{name} on {'none' if cpu is None else cpu}" for name, cpu in on["pinned"].items())
    lines = [
        "medians, ± half the distance of the quartiles; ratios trial by trial"
        + (", TTFT against mlx-lm's faster step" if BASELINE_BEST in found["systems"] else ""),
        *_about_throughput(found),
        *_limits(found["systems"][PIPELINE]),
        f"{on['processor']}, {on['processors']} processors, {on['device']}; {on['platform']}",
        f"pinned: {pinned}" if on["is_pinned"] else "not pinned: this system has no way to do it",
    ]
    lines += [f"BLAS: {' and '.join(sorted({str(blas) for blas in on['blas'].values()}))}"] if on["blas"] else []
    lines += [f"link: emulated {on['link']['preset']}, on top of what the real one takes"] if on["link"] else []
    return [*lines, *_on_all_processors(found), *(f"note: {note}" for note in found["notes"])]


def _about_throughput(found: Mapping[str, Any]) -> list[str]:
    if not found["systems"][PIPELINE]["throughput"]:
        return []
    work = found["workload"]
    return [
        f"throughput at n: n sequences for each stage, prompts of {work['stream_prompt_tokens']:,} and "
        f"{work['stream_tokens']} tokens; while all of them decode"
    ]


def _on_all_processors(found: Mapping[str, Any]) -> Iterator[str]:
    figures = _at(found["systems"], (BASELINE_ALL, "throughput")) or {}
    for n, each in figures.items():
        ratio = _at(found["ratios"], (f"{PIPELINE}/{BASELINE_ALL}", "throughput", n, "tokens_per_second"))
        yield (
            f"mlx-lm in one process on all {found['measured_on']['processors']} processors, throughput at {n}: "
            f"{_cell(each['tokens_per_second'])} tokens/s; the pipeline's is {_cell(ratio)} of it"
        )
