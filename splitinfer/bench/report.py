"""The findings: one JSON document with every figure, and a table of its medians. Pure.

figures       what each figure is, by its path; * stands for a name or a number
measured_on   machine, versions, BLAS of every process, who was pinned where
layout, model, workload
contenders    by name: decode and prefill, each figure a summary with the values of all trials
ratios        by pair: trial by trial, the first to the second
same_tokens   in how many trials a contender gave the pipeline's tokens
notes         what to mind when reading the figures
trials        the raw clock readings and counters

A *limit* stands beside the two figures that have one. One stream passes the stages one after another, so it is at
best as fast as their computing added up, which is one machine's speed. A prompt of C chunks keeps S equal stages busy
at once but for the beginning and the end: at best (C + S - 1) / (C * S) of their computing added up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitinfer.bench.measure import (
    Run,
    Summary,
    causes,
    decode_bytes,
    prefill_bytes,
    prefill_share,
    ratios,
    shares,
    summarize,
)
from splitinfer.bench.workload import KINDS, Kind

PIPELINE, WHOLE, BASELINE, BASELINE_BEST = "pipeline", "whole", "baseline", "baseline_best"
FORMAT = 1
_PAIRS = ((PIPELINE, BASELINE), (PIPELINE, BASELINE_BEST), (PIPELINE, WHOLE), (WHOLE, BASELINE), (WHOLE, BASELINE_BEST))

FIGURES = {
    "*.median": "of all trials; *.low, *.high and *.values are the least, the greatest, and each trial's",
    "*.spread_percent": "distance of the quartiles in percent of the median",
    "contenders.*.decode.tokens_per_second": "tokens after the first, by the seconds they took; one stream",
    "contenders.*.decode.ms_per_token": "the same, turned over",
    "contenders.*.decode.ttft_seconds": "from submission to the first token; short prompt",
    "contenders.*.decode.limit.tokens_per_second": "physical limit: the stages' computing alone, one after the other",
    "contenders.*.decode.limit.ratio_to_one_machine": "physical limit of decode_speed against one equal machine",
    "contenders.*.decode.bytes_per_token": "hidden states over all links for one token",
    "contenders.*.decode.steps_per_token": "passes through the stages for one token",
    "contenders.*.decode.ms_per_token_by_cause.compute.*": "of a token's time, what the stage computed",
    "contenders.*.decode.ms_per_token_by_cause.hops": "of a token's time, between the stages and back",
    "contenders.*.decode.ms_per_token_by_cause.host": "of a token's time, the coordinator's loop",
    "contenders.*.decode.ms_per_token_by_cause.hops_and_host": "both, which is all that is no computing",
    "contenders.*.prefill.ttft_seconds": "from submission to the first token; long prompt",
    "contenders.*.prefill.prompt_tokens_per_second": "the long prompt's tokens by ttft_seconds",
    "contenders.*.prefill.limit.ttft_seconds": "physical limit: share_of_one_stage of the stages' computing added up",
    "contenders.*.prefill.limit.share_of_one_stage": "(C + S - 1) / (C * S): C chunks on S equal stages, by one stage",
    "contenders.*.prefill.limit.chunks": "C, the steps that the long prompt goes in",
    "contenders.*.prefill.limit.stages": "S, the stages it goes through",
    "contenders.*.prefill.bytes_per_token": "hidden states over all links for one prompt token",
    "contenders.*.prefill.busy_percent.*": "of ttft_seconds, the percentage that the stage computed",
    "ratios.*.decode_speed": "tokens_per_second, the first to the second, trial by trial; over 1 is faster",
    "ratios.*.ttft": "ttft_seconds of the long prompt, the first to the second, trial by trial; under 1 is faster",
    "same_tokens.*.*.same": "trials in which the tokens are the pipeline's",
    "same_tokens.*.*.of": "trials",
    "trials.*.trial": "its number, from 0",
    "trials.*.token_times.*": "seconds from submission to each token",
    "trials.*.spent.busy.*": "seconds that each stage computed; of a decode, for the tokens but the first and the last",
    "trials.*.spent.steps.*": "steps of each stage meanwhile",
    "trials.*.spent.sent.*": "bytes of hidden states that each stage sent on meanwhile",
    "trials.*.spent.tokens": "tokens generated meanwhile",
    "trials.*.spent.away": "seconds from the ends of steps on the coordinator's layers to their results",
}

Runs = Mapping[tuple[str, Kind], Sequence[Run]]  # who and what -> one for each trial


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found out. ``stages``: the names of a contender's stages, where it has any."""

    measured_on: Mapping[str, Any]
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    prompt_tokens: int
    chunk: int
    stages: Mapping[str, Sequence[str]]
    runs: Runs
    notes: Sequence[str] = ()


def document(found: Findings) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    names = list(dict.fromkeys(name for name, _ in found.runs))
    written = {
        "tool": "splitinfer bench",
        "format": FORMAT,
        "figures": FIGURES,
        "measured_on": found.measured_on,
        "layout": found.layout,
        "model": found.model,
        "workload": found.workload,
        "contenders": {name: _contender(found, name) for name in names},
        "ratios": {f"{a}/{b}": _ratios(found.runs, a, b) for a, b in _PAIRS if {a, b} <= set(names)},
        "same_tokens": {name: _same(found.runs, name) for name in names if name != PIPELINE},
        "notes": list(found.notes),
        "trials": [
            {"contender": name, "kind": kind, "trial": trial, **_raw(run)}
            for (name, kind), runs in found.runs.items()
            for trial, run in enumerate(runs)
        ],
    }
    rounded: dict[str, Any] = _rounded(written)
    return rounded


def _contender(found: Findings, name: str) -> dict[str, Any]:
    stages = found.stages.get(name)
    decodes, prefills = found.runs.get((name, "decode")), found.runs.get((name, "prefill"))
    return {
        "decode": None if decodes is None else _decode(decodes, stages),
        "prefill": None if prefills is None else _prefill(prefills, stages, found.prompt_tokens, found.chunk),
    }


def _decode(runs: Sequence[Run], stages: Sequence[str] | None) -> dict[str, Any]:
    figures = {
        "tokens_per_second": _over(1 / run.seconds_per_token for run in runs),
        "ms_per_token": _over(1000 * run.seconds_per_token for run in runs),
        "ttft_seconds": _over(run.ttft for run in runs),
    }
    if stages is None:
        return figures
    spent = [run.spent for run in runs if run.spent is not None]
    found = [causes(run.spent, run.counted_seconds_per_token) for run in runs if run.spent is not None]
    split = all(c.hops is not None for c in found)
    return figures | {
        "limit": {"tokens_per_second": _over(1 / sum(c.compute) for c in found), "ratio_to_one_machine": 1.0},
        "bytes_per_token": _over(decode_bytes(s) for s in spent),
        "steps_per_token": _over(s.steps[0] / s.tokens for s in spent),
        "ms_per_token_by_cause": {
            "compute": {stage: _over(1000 * c.compute[i] for c in found) for i, stage in enumerate(stages)},
            "hops": _over(1000 * (c.hops or 0.0) for c in found) if split else None,
            "host": _over(1000 * (c.host or 0.0) for c in found) if split else None,
            "hops_and_host": _over(1000 * c.hops_and_host for c in found),
        },
    }


def _prefill(runs: Sequence[Run], stages: Sequence[str] | None, prompt_tokens: int, chunk: int) -> dict[str, Any]:
    figures = {
        "ttft_seconds": _over(run.ttft for run in runs),
        "prompt_tokens_per_second": _over(prompt_tokens / run.ttft for run in runs),
    }
    if stages is None:
        return figures
    spent = [(run.spent, run.ttft) for run in runs if run.spent is not None]
    num_chunks = math.ceil(prompt_tokens / chunk)
    share = prefill_share(num_chunks, len(stages))
    return figures | {
        "limit": {
            "ttft_seconds": _over(share * sum(s.busy) for s, _ in spent),
            "share_of_one_stage": share,
            "chunks": num_chunks,
            "stages": len(stages),
        },
        "bytes_per_token": _over(prefill_bytes(s, prompt_tokens) for s, _ in spent),
        "busy_percent": {stage: _over(shares(s, seconds)[i] for s, seconds in spent) for i, stage in enumerate(stages)},
    }


def _over(values: Any) -> dict[str, Any]:
    return _plain(summarize(list(values)))


def _plain(summary: Summary) -> dict[str, Any]:
    return {
        "median": summary.median,
        "low": summary.low,
        "high": summary.high,
        "spread_percent": summary.spread,
        "values": list(summary.values),
    }


def _ratios(runs: Runs, a: str, b: str) -> dict[str, Any]:
    """Speed of decoding (over 1: the first is faster) and TTFT of the long prompt (under 1: it is faster)."""
    figures: dict[str, Any] = {"decode_speed": None, "ttft": None}
    if (a, "decode") in runs and (b, "decode") in runs:
        speeds = ([1 / run.seconds_per_token for run in runs[(who, "decode")]] for who in (a, b))
        figures["decode_speed"] = _plain(ratios(*speeds))
    if (a, "prefill") in runs and (b, "prefill") in runs:
        figures["ttft"] = _plain(ratios(*([run.ttft for run in runs[(who, "prefill")]] for who in (a, b))))
    return figures


def _same(runs: Runs, name: str) -> dict[str, Any]:
    """In how many trials the tokens are the pipeline's, of how many."""
    agreed: dict[str, Any] = {}
    for kind in KINDS:
        ours, theirs = runs[(PIPELINE, kind)], runs.get((name, kind), ())
        agreed[kind] = {
            "same": sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=False)),
            "of": len(theirs),
        }
    return agreed


def _raw(run: Run) -> dict[str, Any]:
    return {"token_times": list(run.token_times), "spent": None if run.spent is None else asdict(run.spent)}


def _rounded(value: Any) -> Any:
    """Seven digits say more than any clock here."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


# -- for people ----------------------------------------------------------------------------------

_TITLES = {
    PIPELINE: "pipeline",
    BASELINE: "mlx-lm",
    BASELINE_BEST: "mlx-lm, other step",
    WHOLE: "splitinfer, one stage",
}

_ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("decode, tokens/s", ("decode", "tokens_per_second"), "decode_speed"),
    ("  physical limit", ("decode", "limit", "tokens_per_second"), ""),
    ("  ms per token", ("decode", "ms_per_token"), ""),
    ("  hops", ("decode", "ms_per_token_by_cause", "hops"), ""),
    ("  host", ("decode", "ms_per_token_by_cause", "host"), ""),
    ("  hops and host", ("decode", "ms_per_token_by_cause", "hops_and_host"), ""),
    ("  bytes per token", ("decode", "bytes_per_token"), ""),
    ("prefill, TTFT in s", ("prefill", "ttft_seconds"), "ttft"),
    ("  physical limit", ("prefill", "limit", "ttft_seconds"), ""),
    ("  prompt tokens/s", ("prefill", "prompt_tokens_per_second"), ""),
    ("  bytes per token", ("prefill", "bytes_per_token"), ""),
)


def table(found: Mapping[str, Any]) -> Table:
    """The document's medians, each with its spread."""
    contenders: Mapping[str, Any] = found["contenders"]
    against = _against(contenders)
    drawn = Table(title=_title(found), caption="\n".join(_caption(found)), caption_justify="left", title_justify="left")
    drawn.add_column("")
    for name in contenders:
        drawn.add_column(_TITLES.get(name, name), justify="right")
    if against:
        drawn.add_column(f"pipeline / {_TITLES[against]}", justify="right")
    for label, path, ratio in _rows(contenders[PIPELINE]):
        figures = [_at(contenders[name], path) for name in contenders]
        if not any(figures):
            continue
        cells = [_cell(figure) for figure in figures]
        if against:
            cells.append(_cell(_at(found["ratios"], (_pair(contenders, ratio), ratio))) if ratio else "")
        drawn.add_row(label, *cells)
    return drawn


def _rows(pipeline: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...], str]]:
    """The rows, with those of the single stages where they belong."""
    by_cause = ("decode", "ms_per_token_by_cause", "compute")
    stages = list(pipeline["decode"]["ms_per_token_by_cause"]["compute"])
    split = pipeline["decode"]["ms_per_token_by_cause"]["hops"] is not None
    rows = [row for row in _ROWS if not (split and row[1][-1] == "hops_and_host")]
    rows[3:3] = [(f"  compute on {stage}", (*by_cause, stage), "") for stage in stages]
    return [*rows, *((f"  busy % of {stage}", ("prefill", "busy_percent", stage), "") for stage in stages)]


def _against(contenders: Mapping[str, Any]) -> str | None:
    return next((name for name in (BASELINE, WHOLE) if name in contenders), None)


def _pair(contenders: Mapping[str, Any], ratio: str) -> str:
    """Whom a ratio in the table compares. For the long prompt that is mlx-lm at its faster step size: the one
    tried out as best may have been so by chance."""
    other = _against(contenders)
    if ratio == "ttft" and BASELINE_BEST in contenders:
        other = min((BASELINE, BASELINE_BEST), key=lambda name: contenders[name]["prefill"]["ttft_seconds"]["median"])
    return f"{PIPELINE}/{other}"


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = None if value is None else value.get(key)
    return value


def _cell(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return ""
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


def _limits(pipeline: Mapping[str, Any]) -> list[str]:
    """The physical limits in words."""
    prefill = pipeline["prefill"]["limit"]
    chunks, stages = prefill["chunks"], prefill["stages"]
    return [
        "limit of decoding: the stages' computing, one after the other, so at best 1 of one machine's speed",
        f"limit of TTFT: ({chunks} + {stages} - 1) / ({chunks} x {stages}) = {prefill['share_of_one_stage']:.3g} of "
        f"their computing added up, for {chunks} chunks on {stages} equal stages",
    ]


def _caption(found: Mapping[str, Any]) -> list[str]:
    on = found["measured_on"]
    pinned = ", ".join(f"{who} on {'none' if cpu is None else cpu}" for who, cpu in on["pinned"].items())
    lines = [
        "medians, ± half the distance of the quartiles; ratios trial by trial"
        + (", TTFT against mlx-lm's faster step" if BASELINE_BEST in found["contenders"] else ""),
        *_limits(found["contenders"][PIPELINE]),
        f"{on['processor']}, {on['processors']} processors, {on['device']}; {on['platform']}",
        f"pinned: {pinned}" if on["is_pinned"] else "not pinned: this system has no way to do it",
    ]
    lines += [f"BLAS: {' and '.join(sorted({str(blas) for blas in on['blas'].values()}))}"] if on["blas"] else []
    lines += [f"link: emulated {on['link']['preset']}, on top of what the real one takes"] if on["link"] else []
    return [*lines, *(f"note: {note}" for note in found["notes"])]
