"""Makes one JSON document of all findings. Pure.

figures       what each figure is, by its path; * stands for a name or a number
measured_on   machine, versions, BLAS of every process, and the processor that it was pinned to
layout, model, workload
systems       by name: decode, prefill and throughput, each figure a summary with the values of all trials
ratios        by pair: trial by trial, the first to the second
same_tokens   in how many trials a system gave the pipeline's tokens
notes         caveats for reading the figures
trials        the raw clock readings and counters of single streams

A *limit* stands beside the figures that have one. One stream passes the stages one after another, so it is at best as
fast as the sum of their computing, which is one machine's speed. A prompt of C chunks keeps S equal stages busy at once
but for the beginning and the end: at best (C + S - 1) / (C * S) of the sum of their computing. Many streams keep all
stages busy; a step of them is done whenever the slowest stage is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from splitinfer.bench.shared.measure import (
    Run,
    Summary,
    causes,
    prefill_share,
    quantile,
    ratios,
    summarize,
)
from splitinfer.bench.shared.throughput import BatchRun, best_ratio, step_seconds
from splitinfer.bench.shared.workload import KINDS, Kind

PIPELINE, WHOLE, BASELINE, BASELINE_BEST = "pipeline", "whole", "baseline", "baseline_best"
BASELINE_ALL, PEERS = "baseline_all_processors", "mlx_lm_pipeline"
FORMAT = 3
_PAIRS = (
    (PIPELINE, BASELINE), (PIPELINE, BASELINE_BEST), (PIPELINE, BASELINE_ALL), (PIPELINE, PEERS), (PIPELINE, WHOLE),
    (WHOLE, BASELINE), (WHOLE, BASELINE_BEST), (PEERS, BASELINE),
)  # fmt: skip

FIGURES = {
    "*.median": "of all trials; *.low, *.high and *.values are the least, the greatest, and each trial's",
    "*.spread_percent": "distance of the quartiles in percent of the median",
    "systems.*.decode.tokens_per_second": "tokens after the first, by the seconds they took; one stream",
    "systems.*.decode.ms_per_token": "its inverse",
    "systems.*.decode.ttft_seconds": "from submission to the first token; short prompt",
    "systems.*.decode.limit.tokens_per_second": "physical limit: only the stages' computing, one after the other",
    "systems.*.decode.limit.ratio_to_one_machine": "physical limit of decode_speed against one equal machine",
    "systems.*.decode.bytes_per_token": "hidden states over all links for one token",
    "systems.*.decode.steps_per_token": "passes through the stages for one token",
    "systems.*.decode.ms_per_token_by_cause.compute.*": "of a token's time, what the stage computed",
    "systems.*.decode.ms_per_token_by_cause.hops": "of a token's time, between the stages and back",
    "systems.*.decode.ms_per_token_by_cause.host": "of a token's time, the coordinator's loop",
    "systems.*.decode.ms_per_token_by_cause.hops_and_host": "both, all time but computing",
    "systems.*.prefill.ttft_seconds": "from submission to the first token; long prompt",
    "systems.*.prefill.prompt_tokens_per_second": "the long prompt's tokens by ttft_seconds",
    "systems.*.prefill.limit.ttft_seconds": "physical limit: share_of_one_stage of the stages' computing added up",
    "systems.*.prefill.limit.share_of_one_stage": "(C + S - 1) / (C * S): C chunks on S equal stages, by one stage",
    "systems.*.prefill.limit.chunks": "C, the steps in which the long prompt is read",
    "systems.*.prefill.limit.stages": "S, the stages it goes through",
    "systems.*.prefill.bytes_per_token": "hidden states over all links for one prompt token",
    "systems.*.prefill.busy_percent.*": "of ttft_seconds, the percentage that the stage computed",
    "systems.*.throughput.*.sequences": "decoded at once: n for each stage",
    "systems.*.throughput.*.tokens_per_second": "of all sequences, while all decode: from the last one's third "
    "token to the first one's last; each sequence's own rate, added up",
    "systems.*.throughput.*.window_seconds": "how long all decode",
    "systems.*.throughput.*.itl_ms.p50": "between two tokens of a sequence meanwhile, at their reader: the median",
    "systems.*.throughput.*.itl_ms.p99": "the same: what 99 % do not exceed",
    "systems.*.throughput.*.last_ttft_seconds": "from the first submission to the first token of the last sequence",
    "systems.*.throughput.*.seconds": "from the first submission to the last token of all",
    "systems.*.throughput.*.step_ms.*": "what the stage computes for one step of n rows, while all decode",
    "systems.*.throughput.*.limit.ratio": "physical limit: step_ms of all stages by that of the slowest, which is "
    "the best ratio of stages that compute at once to the same stages one after the other",
    "systems.*.throughput.*.limit.tokens_per_second": "physical limit: n rows whenever the slowest stage is done",
    "systems.*.throughput.*.duty_percent.*": "of the time in which all decode, the share in which the stage computed",
    "systems.*.throughput.*.goodput_duty_percent.*": "the same for rows whose result was kept",
    "systems.*.throughput.*.gaps.*.*.percent": "of that time, the gaps of the stage by this cause",
    "ratios.*.decode_speed": "tokens_per_second, the first to the second, trial by trial; over 1 is faster",
    "ratios.*.ttft": "ttft_seconds of the long prompt, the first to the second, trial by trial; under 1 is faster",
    "ratios.*.throughput.*.tokens_per_second": "many sequences, the first to the second, trial by trial; over 1 is "
    "faster",
    "ratios.*.throughput.*.itl": "itl_ms.p50, the first to the second, trial by trial; under 1 is faster",
    "same_tokens.*.*.same": "trials in which the tokens are the pipeline's; of a throughput, sequences",
    "same_tokens.*.*.of": "trials; of a throughput, the sequences that both had",
    "trials.*.trial": "its number, from 0",
    "trials.*.token_times.*": "seconds from submission to each token",
    "trials.*.spent.busy.*": "seconds that each stage computed; of a decode, for the tokens but the first and the last",
    "trials.*.spent.steps.*": "steps of each stage meanwhile",
    "trials.*.spent.sent.*": "bytes of hidden states that each stage sent on meanwhile",
    "trials.*.spent.tokens": "tokens generated meanwhile",
    "trials.*.spent.away": "seconds from the ends of steps on the coordinator's layers to their results",
}

Runs = Mapping[tuple[str, Kind], Sequence[Run]]  # by system and kind, one for each trial
Batches = Mapping[tuple[str, int], Sequence[BatchRun]]  # by system and sequences for each stage, one for each trial


@dataclass(frozen=True, slots=True)
class Findings:
    """All findings of a measurement.

    stages: the names of a system's stages, where it has any.
    """

    measured_on: Mapping[str, Any]
    layout: Mapping[str, Any]
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    prompt_tokens: int
    chunk: int
    stages: Mapping[str, Sequence[str]]
    runs: Runs
    notes: Sequence[str] = ()
    batches: Batches = field(default_factory=dict)


def document(found: Findings) -> dict[str, Any]:
    """The JSON document."""
    names = list(dict.fromkeys(name for name, _ in (*found.runs, *found.batches)))
    written = {
        "tool": "splitinfer bench",
        "format": FORMAT,
        "figures": FIGURES,
        "measured_on": found.measured_on,
        "layout": found.layout,
        "model": found.model,
        "workload": found.workload,
        "systems": {name: _system(found, name) for name in names},
        "ratios": {f"{a}/{b}": _ratios(found, a, b) for a, b in _PAIRS if {a, b} <= set(names)},
        "same_tokens": {name: _same(found, name) for name in names if name != PIPELINE},
        "notes": list(found.notes),
        "trials": [
            {"system": name, "kind": kind, "trial": trial, **_raw(run)}
            for (name, kind), runs in found.runs.items()
            for trial, run in enumerate(runs)
        ],
    }
    rounded: dict[str, Any] = _rounded(written)
    return rounded


def _system(found: Findings, name: str) -> dict[str, Any]:
    stages = found.stages.get(name)
    decodes, prefills = found.runs.get((name, "decode")), found.runs.get((name, "prefill"))
    return {
        "decode": None if decodes is None else _decode(decodes, stages),
        "prefill": None if prefills is None else _prefill(prefills, stages, found.prompt_tokens, found.chunk),
        "throughput": {
            str(n): _throughput(n, batches, stages) for (system, n), batches in found.batches.items() if system == name
        },
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
        "bytes_per_token": _over(sum(s.sent) / s.tokens for s in spent),
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
        "bytes_per_token": _over(sum(s.sent) / prompt_tokens for s, _ in spent),
        "busy_percent": {
            stage: _over(100 * s.busy[i] / seconds for s, seconds in spent) for i, stage in enumerate(stages)
        },
    }


def _throughput(n: int, runs: Sequence[BatchRun], stages: Sequence[str] | None) -> dict[str, Any]:
    figures = {
        "sequences": len(runs[0].token_times),
        "tokens_per_second": _over(run.tokens_per_second for run in runs),
        "window_seconds": _over(run.end - run.start for run in runs),
        "itl_ms": {f"p{p}": _over(1000 * quantile(run.itl, p / 100) for run in runs) for p in (50, 99)},
        "last_ttft_seconds": _over(run.last_ttft for run in runs),
        "seconds": _over(run.seconds for run in runs),
    }
    windows = [run.window for run in runs if run.window is not None]
    if stages is None or not windows:
        return figures
    steps = [step_seconds(window) for window in windows]
    return figures | {
        "step_ms": {stage: _over(1000 * step[i] for step in steps) for i, stage in enumerate(stages)},
        "limit": {
            "ratio": _over(map(best_ratio, steps)),
            "tokens_per_second": _over(n / max(step) for step in steps),
        },
        **{
            key: {stage: _over(window["stages"][i][key] for window in windows) for i, stage in enumerate(stages)}
            for key in ("duty_percent", "goodput_duty_percent")
        },
        "gaps": {stage: _gaps([window["stages"][i] for window in windows]) for i, stage in enumerate(stages)},
    }


def _gaps(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One stage's gaps by cause, from its windows of all trials."""
    whole = [window["busy_seconds"] + sum(window["gaps"].values()) for window in windows]
    return {
        cause: {"percent": _over(100 * w["gaps"][cause] / all_ for w, all_ in zip(windows, whole, strict=True))}
        for cause in windows[0]["gaps"]
    }


def _over(values: Any) -> dict[str, Any]:
    return _plain(summarize(list(values)))


def _plain(summary: Summary) -> dict[str, Any]:
    return {"spread_percent" if name == "spread" else name: value for name, value in summary.items()}


def _ratios(found: Findings, a: str, b: str) -> dict[str, Any]:
    """Ratios of a to b: speeds (over 1: a is faster), the long prompt's TTFT and ITL (under 1: a is faster)."""
    runs, batches = found.runs, found.batches
    figures: dict[str, Any] = {"decode_speed": None, "ttft": None, "throughput": {}}
    if (a, "decode") in runs and (b, "decode") in runs:
        speeds = ([1 / run.seconds_per_token for run in runs[(system, "decode")]] for system in (a, b))
        figures["decode_speed"] = _plain(ratios(*speeds))
    if (a, "prefill") in runs and (b, "prefill") in runs:
        figures["ttft"] = _plain(ratios(*([run.ttft for run in runs[(system, "prefill")]] for system in (a, b))))
    for n in (n for system, n in batches if system == a and (b, n) in batches):
        ours, theirs = batches[(a, n)], batches[(b, n)]
        figures["throughput"][str(n)] = {
            "tokens_per_second": _plain(ratios(*([run.tokens_per_second for run in each] for each in (ours, theirs)))),
            "itl": _plain(ratios(*([quantile(run.itl, 0.5) for run in each] for each in (ours, theirs)))),
        }
    return figures


def _same(found: Findings, name: str) -> dict[str, Any]:
    """The number of trials, of a throughput of sequences, whose tokens are the pipeline's."""
    agreed: dict[str, Any] = {}
    for kind in KINDS:
        pairs = zip(found.runs[(PIPELINE, kind)], found.runs.get((name, kind), ()), strict=False)
        agreed[kind] = _count([ours.token_ids == theirs.token_ids for ours, theirs in pairs])
    for n in (n for system, n in found.batches if system == name):
        trials = zip(found.batches[(PIPELINE, n)], found.batches[(name, n)], strict=True)
        agreed[f"throughput_{n}"] = _count(
            [a == b for ours, theirs in trials for a, b in zip(ours.token_ids, theirs.token_ids, strict=False)]
        )
    return agreed


def _count(same: Sequence[bool]) -> dict[str, int]:
    return {"same": sum(same), "of": len(same)}


def _raw(run: Run) -> dict[str, Any]:
    return {"token_times": list(run.token_times), "spent": None if run.spent is None else asdict(run.spent)}


def _rounded(value: Any) -> Any:
    """Floats with seven digits, more than the clocks resolve."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
