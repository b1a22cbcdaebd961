"""What only one kind of device does (``on_gpu``, and whether arithmetic is batch invariant): tried on this device.

Each finding says whether the branch was *taken*, by a witness that only it leaves behind, and how far its result is
from the same computed in a way that the branch has no part in. Whether it should have been taken is judged elsewhere.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.bench.gpu.models import Sequences, row_errors
from splitinfer.bench.shared.fidelity import whole_model
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.kv.format import format_of
from splitinfer.core.scheduler.cost_model import Shape
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import ServingOptions
from splitinfer.engine.cpu_affinity import has_own_processor
from splitinfer.engine.device.device import Ticket, Work
from splitinfer.engine.device.selection import open_device
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.stage.row import Row
from splitinfer.engine.stage.sampler import Sampler, read
from splitinfer.engine.versions import device_name
from splitinfer.jobs.process import Report
from splitinfer.llm.setup import token_budget_of
from splitinfer.models import cohort, quantised
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import open_model
from splitinfer.models.kv_trial import try_blocks
from splitinfer.models.quantised import QuantisedKVCache
from splitinfer.models.step import StepModel, arrays_to_evaluate
from splitinfer.selftest.probes.pipelines import DEMO_LAYERS

_VOCAB = 2048  # of both demo models
_LENGTHS = (6, 8, 11, 15)  # of sequences that decode together: unequal
_STEPS = 3
_LONG = 512  # rows of the largest step, on a GPU
_KV_HEADS, _HEADS, _DIM, _TOKENS = 2, 6, 64, 40


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report every branch."""
    report.guarded("device name", lambda: {"name": device_name(), "own_processor": has_own_processor()})
    report.guarded("sampler", _sampler)
    report.guarded("quantised attention", _quantised_attention)
    stage = whole_model(open_model("demo"), "auto")
    report.guarded("kept dtype", partial(_kept_dtype, stage))
    step = StepModel(stage)
    report.guarded("trials at loading", partial(_trials, step))
    report.guarded("launching ahead", partial(_launching_ahead, step))
    report.guarded("cohort", partial(_cohort, step))
    report.guarded("large steps", partial(_large_steps, step))
    report.guarded("quantised cohort", _quantised_cohort)


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
        with watched(quantised, "_over_words", taken):
            out = quantised.attention(q, keys, values, _DIM**-0.5, None)
        wanted = quantised.attention(q, keys.numbers(), values.numbers(), _DIM**-0.5, None)
        errors = row_errors(out.reshape(_HEADS, _DIM), wanted.reshape(_HEADS, _DIM))
        found["error"] = max(found["error"], *errors)
    return found


def _kept_dtype(stage: StageModel) -> dict[str, Any]:
    """The dtypes of the weights as stored and as loaded."""
    loaded = {str(array.dtype) for _, array in tree_flatten(stage.whole.parameters())}
    names = sorted(name.removeprefix("mlx.core.") for name in loaded)
    return {"dtype": names[0] if len(names) == 1 else "several", "float32": names == ["float32"]}


def _launching_ahead(step: StepModel) -> dict[str, Any]:
    """Steps of two sequences in turn, each launched while the other's is under way, and completed by whoever waits."""
    device = open_device(0, (0, DEMO_LAYERS))
    sequences, alone = (Sequences(step, _VOCAB, _LENGTHS[:2]) for _ in range(2))
    by_thread, done = set[str](), list[mx.array]()
    failed: list[StepFailed] = []

    def complete(ticket: Ticket) -> None:
        by_thread.add(threading.current_thread().name)
        done.append(ticket.outputs[0])

    steps = StepsUnderWay[Ticket](device.wait, complete, failed.append)
    began = time.monotonic()
    for number in range(2 * _STEPS):
        parts = sequences.parts([number % 2])
        outputs = sequences.build([number % 2], parts)
        ticket = device.launch(outputs, arrays_to_evaluate(parts), Work(Shape(1)), time.monotonic())
        steps.add(ticket, is_done=device.computes_at_launch)
    steps.drain()
    seconds = time.monotonic() - began
    steps.close()
    if failed:
        raise failed[0].error
    wanted = [alone.run([number % 2])[0] for number in range(2 * _STEPS)]
    return {
        "taken": not device.computes_at_launch,
        "waiter": by_thread == {"waiter"},
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
    stage = whole_model(open_model("demo-draft"), "auto")
    stage.use_format(format_of("k8v8"))
    calls: list[None] = []
    with watched(quantised, "_over_words", lambda *_: calls.append(None)):
        found = _together(StepModel(stage))
    return {**found, "taken": bool(calls)}


def _large_steps(step: StepModel) -> dict[str, Any]:
    """A prompt in steps as large as the scheduler makes them here, against smaller ones."""
    budget = token_budget_of(ServingOptions(), [device_name()])
    ids = made_up("selftest", budget, _VOCAB)
    rows = []
    for chunk in (budget, budget // 8):
        sequences = Sequences(step, _VOCAB, [0])
        caches = sequences.caches[0]
        for at in range(0, budget, chunk):
            parts = sequences.parts([0], chunk)
            outputs = step.run(parts, ids[at : at + chunk], None)
            mx.eval(outputs, arrays_to_evaluate(parts))
        assert caches.place.position == budget
        rows.append(outputs[0])
    return {"taken": budget >= _LONG, "rows": budget, "error": max(row_errors(rows[0], rows[1]))}


def _trials(step: StepModel) -> dict[str, Any]:
    """What loading decides: how rows of many sequences are computed, and whether KV is kept."""
    return {"way": step.way.value, "kept_kv": try_blocks(step.stage).why_not is None}
