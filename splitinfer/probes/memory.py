"""Memory before a model, with it, after many requests, and after it is closed; what a GPU may keep wired."""

import gc
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import psutil

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.models.memory import free_bytes, on_gpu
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import SEND, Blame, Finding, Outcome, failed, passed
from splitinfer.probes.tokens import made_up_prompt, pipeline

MOST_LEAKED = 8 * 2**20  # bytes of arrays that may stay; MLX and Python keep some for later
MOST_RESIDENT = 128 * 2**20  # bytes by which a process may grow in twelve rounds
_WARM_UP, _ROUNDS, _AT_ONCE = 3, 12, 3  # rounds of requests, and requests of a round
_PROMPT, _TOKENS, _VOCAB = 8, 5, 2048


def measure(_options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report bytes at each time, and what a GPU may keep wired."""
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    at = {"before": _bytes()}
    with pipeline(None, prefix_cache=False) as llm:
        at["loaded"] = _bytes()
        for number in range(1, _WARM_UP + _ROUNDS + 1):
            _round(llm)
            report.is_alive()
            if number in (_WARM_UP, _WARM_UP + _ROUNDS):
                at["warm" if number == _WARM_UP else "used"] = _bytes()
    del llm
    at["closed"] = _bytes()
    is_metal = on_gpu() and mx.metal.is_available()
    wired = _wired() if is_metal else None
    report(*judge_memory({**at, "rounds": _ROUNDS, "peak": mx.get_peak_memory(), "wired": wired}))


def _round(llm: LLM) -> None:
    prompts = [made_up_prompt(_PROMPT + i, _VOCAB) for i in range(_AT_ONCE)]
    llm.generate(prompts, SamplingParams(max_tokens=_TOKENS, ignore_eos=True))


def _bytes() -> dict[str, int]:
    gc.collect()
    mx.clear_cache()
    resident = psutil.Process().memory_info().rss
    return {"active": mx.get_active_memory(), "resident": resident, "free": free_bytes()}


def _wired() -> dict[str, Any]:
    """Return the limit that loading a stage has set, which MLX tells when it is set again; the recommended working
    set."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    limit = mx.set_wired_limit(recommended) if isinstance(recommended, int) else None
    return {"limit": limit, "recommended": recommended}


def judge_memory(given: Mapping[str, Any]) -> list[Finding]:
    """Return findings about leaks and wired memory. ``wired`` is None without Metal."""
    return [_growth(given), _closing(given), _kept_wired(given["wired"])]


def _growth(given: Mapping[str, Any]) -> Finding:
    arrays, resident = (given["used"][name] - given["warm"][name] for name in ("active", "resident"))
    said = f"{arrays / 1e6:+.1f} MB of arrays and {resident / 1e6:+.1f} MB of the process in {given['rounds']} rounds"
    if arrays > MOST_LEAKED or resident > MOST_RESIDENT:
        return failed("growth", Blame.MEMORY, f"memory grows with every request: {said}", SEND, given)
    return passed("growth", said, given)


def _closing(given: Mapping[str, Any]) -> Finding:
    left = given["closed"]["active"] - given["before"]["active"]
    if left > MOST_LEAKED:
        sentence = f"{left / 1e6:.1f} MB of arrays are not freed when the model is closed"
        return failed("closing", Blame.MEMORY, sentence, SEND)
    return passed("closing", "all arrays are freed when the model is closed")


def _kept_wired(wired: Mapping[str, Any] | None) -> Finding:
    name = "wired limit"
    if wired is None:
        return Finding(name, Outcome.NOT_AVAILABLE, "only Metal has one")
    limit, recommended = wired["limit"], wired["recommended"]
    if recommended is None:
        sentence = "MLX names no recommended working set, so a stage counts on all free memory"
        return failed(name, Blame.MEMORY, sentence, SEND)
    if limit != recommended:
        sentence = f"a loaded stage keeps {(limit or 0) / 1e9:.3g} GB wired and not {recommended / 1e9:.3g} GB"
        return failed(name, Blame.MEMORY, sentence, SEND)
    return passed(name, f"the GPU may keep {recommended / 1e9:.3g} GB wired, as it recommends")
