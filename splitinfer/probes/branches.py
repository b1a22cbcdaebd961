"""What only one kind of device does (``on_gpu``, and whether arithmetic is batch invariant): tried on this device.

Each look says whether the branch was *taken*, by a witness that only it leaves behind, and how far its result is from
the same computed in a way that the branch has no part in. A branch that another device takes is not available here, if
this device's own way gave the right result.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.core.kv.format import format_of
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import ServingOptions
from splitinfer.engine.cpu_affinity import has_own_processor
from splitinfer.engine.device.device import Device, Ticket, open_device
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.sampler import Sampler, read
from splitinfer.engine.versions import device_name
from splitinfer.llm.setup import token_budget_of
from splitinfer.models import cohort, quantised
from splitinfer.models.attention import backend
from splitinfer.models.blas import is_batch_invariant
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import open_model
from splitinfer.models.kv_trial import why_no_blocks
from splitinfer.models.loader import whole_model
from splitinfer.models.memory import on_gpu
from splitinfer.models.quantised import QuantisedKVCache
from splitinfer.models.step import StepModel
from splitinfer.probes.child import Report
from splitinfer.probes.finding import SEND, STOP, Finding, Outcome, Reason, failed, passed
from splitinfer.probes.machine import DEMO_LAYERS
from splitinfer.probes.steps import Sequences, row_errors, start

_VOCAB = 2048  # of both demo models
_LENGTHS = (6, 8, 11, 15)  # of sequences that decode together: unequal
_STEPS = 3
_LONG = 512  # rows of the largest step, on a GPU
_KV_HEADS, _HEADS, _DIM, _TOKENS = 2, 6, 64, 40


def measure(_options: Mapping[str, Any], report: Report) -> None:
    here = Here(on_gpu(), is_batch_invariant(), _open().computes_at_launch, device_name(), backend() == "metal")

    def look(name: str, find: Callable[[], Mapping[str, Any]]) -> None:
        report.guarded(name, lambda: judge_branch(name, find(), here))

    stage = whole_model(open_model("demo"))
    step = StepModel(stage)
    report.guarded("device name", lambda: judge_name(device_name(), has_own_processor(), here))
    report.guarded("trials at loading", lambda: judge_trials(_trials(step)))
    look("sampler", _sampler)
    look("quantised attention", _quantised_attention)
    look("kept dtype", partial(_kept_dtype, stage))
    look("launching ahead", partial(_launching_ahead, step))
    look("cohort", partial(_cohort, step))
    look("large steps", partial(_large_steps, step))
    look("quantised cohort", _quantised_cohort)


def _open() -> Device:
    return open_device(0, (0, DEMO_LAYERS))


@contextmanager
def watched(module: ModuleType, name: str, seen: Callable[..., None]) -> Iterator[None]:
    """Have ``seen`` called with the arguments of every call of a module's function, in this process."""
    original = getattr(module, name)

    def call(*args: Any, **named: Any) -> Any:
        seen(*args, **named)
        return original(*args, **named)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, original)


def _sampler() -> dict[str, Any]:
    """A compiled function is traced once for two calls; one that is not compiled, twice."""
    logits = 4 * mx.random.normal((5, _VOCAB), key=mx.random.key(3))
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=20, min_p=0.05),
        SamplingParams(temperature=0.7, logprobs=2),
    ]
    rows = [Row(one, 7, 10 + i, ()) for i, one in enumerate(params)]
    usual, other = Sampler(_VOCAB), Sampler(_VOCAB, compiled=False)
    tokens = [_sampled(sampler, logits, rows) for sampler in (usual, usual, other)]
    return {
        "taken": usual.num_traced < other.num_traced * 2,
        "equal": tokens[0] == tokens[1] == tokens[2],
        "rows": len(rows),
    }


def _sampled(sampler: Sampler, logits: mx.array, rows: list[Row]) -> list[int]:
    choices = sampler.choose(logits, rows)
    mx.eval([array for choice in choices for array in choice.arrays()])
    return [sampled.token_id for sampled in read(choices, rows)]


def _quantised_attention() -> dict[str, Any]:
    """Over stored words, against the same numbers unpacked."""
    random = iter(mx.random.split(mx.random.key(5), 3))
    k, v = (mx.random.normal((1, _KV_HEADS, _TOKENS, _DIM), key=next(random)) for _ in range(2))
    q = mx.random.normal((1, _HEADS, 1, _DIM), key=next(random))
    found: dict[str, Any] = {"taken": False, "error": 0.0}

    def taken(*_: Any) -> None:
        found["taken"] = True

    for name in ("k8v8", "k8v4"):
        keys, values = QuantisedKVCache(cast(Any, format_of(name))).update_and_fetch(k, v)
        with watched(quantised, "over_words", taken):
            out = quantised.attention(q, keys, values, _DIM**-0.5, None)
        wanted = quantised.attention(q, keys.numbers(), values.numbers(), _DIM**-0.5, None)
        errors = row_errors(out.reshape(_HEADS, _DIM), wanted.reshape(_HEADS, _DIM))
        found["error"] = max(found["error"], *errors)
    return found


def _kept_dtype(stage: StageModel) -> dict[str, Any]:
    """The dtypes of the weights as stored and as loaded."""
    loaded = {str(array.dtype) for _, array in tree_flatten(stage.whole.parameters())}
    names = sorted(name.removeprefix("mlx.core.") for name in loaded)
    return {"dtype": names[0] if len(names) == 1 else "several", "taken": names != ["float32"]}


def _launching_ahead(step: StepModel) -> dict[str, Any]:
    """Steps of two sequences in turn, each launched while the other's is under way, and completed by whoever waits."""
    device = _open()
    sequences, alone = (Sequences(step, _VOCAB, _LENGTHS[:2]) for _ in range(2))
    by_thread, done = set[str](), list[mx.array]()
    failed: list[StepFailed] = []

    def complete(ticket: Ticket) -> None:
        by_thread.add(threading.current_thread().name)
        done.append(ticket.outputs[0])

    steps = StepsUnderWay[Ticket](failed.append)
    began = time.monotonic()
    for number in range(2 * _STEPS):
        ticket = start(device, sequences, [number % 2]).ticket
        steps.add(ticket, device.wait, complete, is_done=device.computes_at_launch)
    steps.drain()
    seconds = time.monotonic() - began
    steps.close()
    if failed:
        raise failed[0].error
    wanted = [alone.run([number % 2])[0] for number in range(2 * _STEPS)]
    return {
        "taken": not device.computes_at_launch and by_thread == {"waiter"},
        "completed": len(done),
        "launched": 2 * _STEPS,
        "error": max(row_errors(mx.concatenate(done), mx.concatenate(wanted))),
        "seconds": seconds,
    }


def _cohort(step: StepModel) -> dict[str, Any]:
    """Rows of unequal sequences in one attention call. Its heads are folded into rows on a CPU only."""
    folded: list[bool] = []

    def seen(q: mx.array, k: Any, *_: Any) -> None:
        folded.append(q.shape[1] == k.shape[1] != step.stage.whole.args.num_attention_heads)

    with watched(cohort, "attention", seen):
        found = _together(step)
    return {**found, "calls": len(folded), "taken": bool(folded) and not any(folded)}


def _together(alone_by: StepModel) -> dict[str, Any]:
    """Errors of rows together against each alone, and of a prompt read in other chunks, which is rounding only."""
    step = StepModel(alone_by.stage, exact=False)
    step.way = alone_by.way  # which takes trials
    together, alone = (Sequences(one, _VOCAB, _LENGTHS) for one in (step, alone_by))
    which = range(len(_LENGTHS))
    rows, wanted = list[mx.array](), list[mx.array]()
    for _ in range(_STEPS):
        rows += together.run(which)
        wanted += [row for i in which for row in alone.run([i])]
    ways = [Sequences(step, _VOCAB, [_LENGTHS[-1]], chunk).run([0])[0] for chunk in (64, 4)]
    return {
        "error": max(row_errors(mx.concatenate(rows), mx.concatenate(wanted))),
        "own_rounding": max(row_errors(*ways)),
        "rows": len(_LENGTHS),
        "way": step.way.value,
    }


def _quantised_cohort() -> dict[str, Any]:
    """The same with keys and values in 8 bits, on the smaller of the demo models."""
    stage = whole_model(open_model("demo-draft"))
    stage.use_format(format_of("k8v8"))
    calls: list[None] = []
    with watched(quantised, "over_words", lambda *_: calls.append(None)):
        found = _together(StepModel(stage))
    return {**found, "taken": bool(calls)}


def _large_steps(step: StepModel) -> dict[str, Any]:
    """A prompt in steps as large as the scheduler makes them here, against smaller ones."""
    budget = token_budget_of(ServingOptions(), [device_name()])
    rows = [Sequences(step, _VOCAB, [budget - chunk], chunk).run([0], chunk)[0] for chunk in (budget, budget // 8)]
    return {"taken": budget >= _LONG, "rows": budget, "error": max(row_errors(*rows))}


def _trials(step: StepModel) -> dict[str, Any]:
    """What loading decides: how rows of many sequences are computed, and whether KV is kept."""
    return {"way": step.way.value, "kept_kv": why_no_blocks(step.stage) is None}


# -- what is right -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Here:
    """What computes here. ``exact``: whether arithmetic is batch invariant. ``metal``: whether the GPU is a Mac's."""

    gpu: bool
    exact: bool
    computes_at_launch: bool
    device: str
    metal: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """``gpu``, ``cpu``: what a GPU does, and what a processor does. ``bound``: the largest relative error of a row
    where arithmetic is not batch invariant; of several rounding errors of half precision, in twelve layers."""

    gpu: str
    cpu: str
    bound: float = 0.02


BRANCHES: Mapping[str, Branch] = {
    "sampler": Branch("the sampler is compiled", "the sampler is not compiled"),
    "quantised attention": Branch("attention multiplies with stored words", "stored words are unpacked first"),
    "kept dtype": Branch("weights keep the model's dtype", "weights are computed in float32"),
    "launching ahead": Branch(
        "steps are launched ahead, and a thread of its own waits for them", "a step is computed when it is launched"
    ),
    "cohort": Branch("heads of sequences together stay as they are", "heads that share keys become rows"),
    "quantised cohort": Branch("sequences together read stored words", "sequences together unpack stored words"),
    "large steps": Branch("a prompt is read 512 tokens a step", "a prompt is read 128 tokens a step", bound=0.05),
}


def judge_branch(name: str, given: Mapping[str, Any], here: Here) -> Finding:
    """Whether a branch was taken where it should be, and gives what the same computation gives without it."""
    branch = BRANCHES[name]
    by = f"; off by {given['error']:.2g} of a row, which is rounding" if given.get("error") else ""
    if (wrong := _wrong(given, branch, here)) is not None:
        return failed(name, Reason.LARGE_ERROR, wrong, STOP, given)
    others = {
        "launching ahead": not here.computes_at_launch,
        "large steps": here.device != "cpu",
        "quantised attention": here.metal,
        "quantised cohort": here.metal,
    }
    should = others.get(name, here.gpu)
    does, other = (branch.gpu, branch.cpu) if given["taken"] else (branch.cpu, branch.gpu)
    if should is not given["taken"]:
        return failed(name, Reason.NOT_TAKEN, f"on this device it should be that {other}, but {does}", SEND, given)
    if should:
        return passed(name, does + by, given)
    sentence = f"only a GPU does this; here {does}{by}"
    return Finding(name, Outcome.NOT_AVAILABLE, sentence, reason=Reason.OTHER_DEVICE, numbers=given)


def _wrong(given: Mapping[str, Any], branch: Branch, here: Here) -> str | None:
    if given.get("equal") is False:
        return "it gives other tokens than the same without it"
    if given.get("completed") != given.get("launched"):
        return f"only {given['completed']} of {given['launched']} steps ended"
    bound = 0.0 if here.exact else max(branch.bound, 4 * given.get("own_rounding", 0.0))
    error = given.get("error", 0.0)
    if not math.isfinite(error):
        return "its results are not numbers"
    if error > bound:
        return f"its results are off by {error:.2g} of a row, and rounding allows {bound:.2g}"
    return None


def judge_trials(given: Mapping[str, Any]) -> Finding:
    """What loading decided for the demo model, which allows both."""
    name = "trials at loading"
    if given["way"] == "rows" and given["kept_kv"]:
        return passed(name, "rows of many sequences are computed together, and KV is kept", given)
    kept = "is" if given["kept_kv"] else "is not"
    sentence = f"rows of many sequences are computed by {given['way']}, and KV {kept} kept: the demo model allows both"
    return failed(name, Reason.NOT_TAKEN, sentence, SEND, given)


def judge_name(device: str, own_processor: bool, here: Here) -> Finding:
    """What peers are told that stages compute on, and whether a stage yields its processor to its device."""
    name, numbers = "device name", {"device": device, "own_processor": own_processor}
    if here.gpu and device == "cpu":
        sentence = "MLX computes on a GPU, and peers would be told that it is a cpu"
        return failed(name, Reason.NOT_TAKEN, sentence, SEND, numbers)
    if here.gpu and own_processor:
        sentence = "a stage on a GPU yields its processor after every frame, as one that shares it with its device does"
        return failed(name, Reason.NOT_TAKEN, sentence, SEND, numbers)
    return passed(name, f"peers are told that stages compute on {device}", numbers)
