"""Tokens by one road, greedy and sampled, without drafts and with them, and from KV kept across a restart.

Where a road chooses another token than the reference, the request is made again with the reference's tokens up to and
including that one: so every position is compared, whatever came before it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.jobs.process import Report
from splitinfer.llm import LLM
from splitinfer.selftest.probes.pipelines import pipeline, worker_stage
from splitinfer.selftest.probes.reference import Expected, PlainModel, Sampling
from transports.rdma.probe import usable

_SAMPLED = Sampling(temperature=0.8, seed=7)
_DRAFTS = Flight(first=3, further=2, in_flight=2)
_KEPT_PROMPT, _KEPT_TOKENS = BLOCK + 40, 4
_MOST_PARTINGS = 4  # of one answer; with more than that something is wrong, whatever the margins


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report each kind of answer by ``road`` (``pipelines``). ``tokens``: of an answer; ``restarts``: whether KV is
    kept across a restart, too."""
    if options["road"] == "worker, rdma" and (why_not := usable("jaccl")) is not None:
        report("unavailable", {"why": why_not})
        return
    plain, others = PlainModel(), _waiters()
    cases = {name: plain.answer(plain.prompt, options["tokens"], one) for name, one in _SAMPLINGS.items()}
    report("rounding", plain.rounding(cases["greedy"]))
    with worker_stage(options) as second:
        began = time.monotonic()
        with pipeline(second, draft="demo-draft") as llm:
            report("opened", {"seconds": time.monotonic() - began})
            for name, expected in cases.items():
                report.guarded(name, partial(_answered, llm, expected, _SAMPLINGS[name], OFF))
            for name, expected in cases.items():
                report.guarded(f"{name}, drafts", partial(_with_drafts, llm, expected, _SAMPLINGS[name]))
            report.guarded("device", partial(_device, llm, others))
        if options["restarts"]:
            long = plain.answer(made_up_prompt(_KEPT_PROMPT, plain.vocab_size), _KEPT_TOKENS, Sampling())
            kept = Path(options["folder"]) / f"kv of {options['road']}"
            report.guarded("kept KV", lambda: _across_a_restart(lambda: pipeline(second, kv_dir=kept), long))


_SAMPLINGS = {"greedy": Sampling(), "sampled": _SAMPLED}


def made_up_prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids that do not repeat soon."""
    return [(i * 37 + 11 + i * i) % vocab_size for i in range(length)]


def _answered(llm: LLM, expected: Expected, sampling: Sampling, flight: Flight) -> dict[str, Any]:
    """What the pipeline answers, compared at every position; figures of the first request."""
    given, partings, first = 0, list[dict[str, Any]](), None
    while given < len(expected.tokens) and len(partings) < _MOST_PARTINGS:
        params = SamplingParams(
            max_tokens=len(expected.tokens) - given, temperature=sampling.temperature, seed=sampling.seed,
            ignore_eos=True,
        )  # fmt: skip
        prompt = [*expected.prompt, *expected.tokens[:given]]
        output = llm.submit(prompt, params, flight=flight).result()
        first = first or output
        at = parting(expected.tokens[given:], output.token_ids)
        if at is None:
            break
        given += at
        token = output.token_ids[at] if at < len(output.token_ids) else None
        margin = expected.margins[given] if token is not None else None
        partings.append({"at": given, "token": token, "wanted": expected.tokens[given], "margin": margin})
        given += 1
    assert first is not None
    times = first.token_times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None
    return {
        "tokens": len(expected.tokens),
        "compared": len(expected.tokens) if len(partings) < _MOST_PARTINGS else given,
        "partings": partings,
        "ttft_seconds": times[0] if times else None,
        "tokens_per_second": rate,
        "cached_tokens": first.num_cached_tokens,
    }


def parting(wanted: Sequence[int], given: Sequence[int]) -> int | None:
    """The first place at which two answers differ; ``None`` if they are the same.

    >>> parting([5, 6, 7], [5, 8, 7]), parting([5, 6], [5]), parting([5, 6], [5, 6])
    (1, 1, None)
    """
    if list(wanted) == list(given):
        return None
    pairs = zip(wanted, given, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(wanted), len(given)))


def _with_drafts(llm: LLM, expected: Expected, sampling: Sampling) -> dict[str, Any]:
    before = _speculation(llm)
    found = _answered(llm, expected, sampling, _DRAFTS)
    after = _speculation(llm)
    return {**found, **{f"drafts_{name}": after[name] - before[name] for name in before}}


def _speculation(llm: LLM) -> dict[str, int]:
    said = llm.stats()["speculation"] or {}
    return {name: int(said.get(name, 0)) for name in ("sent", "accepted")}


def _waiters() -> set[threading.Thread]:
    """The threads of this process that wait for a device."""
    return {thread for thread in threading.enumerate() if thread.name == "waiter"}


def _device(llm: LLM, others: set[threading.Thread]) -> dict[str, Any]:
    """What the loops of this process did, as far as it can be seen from outside. ``others``: waiters of before."""
    stats = llm.stats()
    return {
        "waiter": not _waiters() <= others,
        "token_budget": stats["token_budget"],
        "stages": [stage["device"] for stage in stats["stages"]],
        "busy_seconds": [stage["busy_seconds"] for stage in stats["stages"]],
        "steps": [stage["steps"] for stage in stats["stages"]],
    }


def _across_a_restart(open_pipeline: Callable[[], Any], expected: Expected) -> dict[str, Any]:
    """A prompt longer than a block, answered, and answered again by pipelines that start anew."""
    with open_pipeline() as llm:
        before = _answered(llm, expected, Sampling(), OFF)
    with open_pipeline() as llm:
        after = _answered(llm, expected, Sampling(), OFF)
    return {**after, "partings": [*before["partings"], *after["partings"]], "kept_before": before["cached_tokens"]}
