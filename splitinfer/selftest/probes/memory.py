"""Memory before a model, with it, after many requests, and after it is closed; what a GPU may keep wired."""

import gc
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import psutil

from splitinfer.core.sequence import SamplingParams
from splitinfer.jobs.process import Report
from splitinfer.llm import LLM
from splitinfer.models.memory import free_bytes, on_gpu
from splitinfer.selftest.probes.pipelines import pipeline
from splitinfer.selftest.probes.roads import made_up_prompt

_WARM_UP, _ROUNDS = 3, 12
_PROMPT, _TOKENS, _VOCAB = 8, 5, 2048
_AT_ONCE = 3  # requests of a round


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report bytes at each time."""
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    at = {"before": _bytes()}
    with pipeline(None, prefix_cache=False) as llm:
        at["loaded"] = _bytes()
        for number in range(_WARM_UP + _ROUNDS):
            _round(llm)
            report("progress", {"rounds": number + 1})
            if number + 1 in (_WARM_UP, _WARM_UP + _ROUNDS):
                at["warm" if number < _WARM_UP else "used"] = _bytes()
    del llm
    at["closed"] = _bytes()
    report("memory", {**at, "rounds": _ROUNDS, "peak": mx.get_peak_memory(), "wired": _wired()})


def _round(llm: LLM) -> None:
    prompts = [made_up_prompt(_PROMPT + i, _VOCAB) for i in range(_AT_ONCE)]
    llm.generate(prompts, SamplingParams(max_tokens=_TOKENS, ignore_eos=True))


def _bytes() -> dict[str, int]:
    gc.collect()
    mx.clear_cache()
    resident = psutil.Process().memory_info().rss
    return {"active": mx.get_active_memory(), "resident": resident, "free": free_bytes()}


def _wired() -> dict[str, Any]:
    """The limit that loading a stage has set, which MLX tells when it is set again; the recommended working set."""
    if not (on_gpu() and mx.metal.is_available()):
        return {"limit": None, "recommended": None}
    recommended = mx.device_info().get("max_recommended_working_set_size")
    limit = mx.set_wired_limit(recommended) if isinstance(recommended, int) else None
    return {"limit": limit, "recommended": recommended}
