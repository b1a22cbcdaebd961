"""Figures that only a GPU can show, for ``scripts/on_gpu``: launches, errors of rows, how soon results can be sent, and
what MLX does with what the loops avoid.

*Launch.* While a launch (``mx.async_eval``) is under way its thread can launch nothing else and send nothing. Where a
device takes in a few command buffers only, a launch returns when nearly all of its step is computed. Measured twice: on
an idle device (``launch_ms``, ``share``), and while another sequence's step is under way (``second_ms``,
``second_share``), which is what launching ahead does.

*Rows.* Kernels differ with the number of rows, so rows of many sequences round otherwise than each alone. How far that
goes after so many layers is what a trial at loading has to allow for. Beside it stands the model's own noise: one
sequence whose prompt is read in other chunks, each computed alone.

*Send.* From the end of a step until its results are ready to be sent, while the next step is under way: whatever is
computed for a result after its step stands in line behind the next one. The engine's loop is imitated: at most two
steps are under way, and where the device does not compute at launch another thread waits for them, reduces results to
what is still wanted and makes the parts of the frame.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
from random_model import Shape, build

from gpu_figures.steps import Sequences, row_errors, start
from splitinfer.bench.parts import made_up
from splitinfer.core.codecs import INT8, NONE
from splitinfer.core.kv.format import FORMATS
from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.device import Device, open_device
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.stage.launched import Launched
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.models.border.hidden_states import to_parts
from splitinfer.models.border.tensors import memory_of
from splitinfer.models.caches.quantised import QuantisedKVCache, attention, over_words
from splitinfer.models.caches.rows import attend_by_rows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.rows.kv_trial import why_no_blocks
from splitinfer.models.rows.step import StepModel, Way
from splitinfer.probes.child import ProbeReport

_PROMPT = 32  # tokens
_WARM_UP = 4  # steps, in which kernels are loaded or compiled
_LENGTHS = (24, 3)  # tokens of the first prompt, and by how many each other is longer
_LONG, _CHUNKS = 96, (96, 16)  # the prompt that is read in two ways


def distribution(values: Sequence[float]) -> dict[str, float]:
    """The median, two quantiles and the largest of some values, and their number."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "max": ordered[-1],
    }


# -- launches ----------------------------------------------------------------------------------------------------------


def launch(options: Mapping[str, Any], report: ProbeReport) -> None:
    """For each number of bits (0: the dtype's own) and of layers."""
    for bits in options["bits"]:
        shape = replace(Shape(**options["shape"]), bits=bits)
        structure = cache(lambda shape=shape: ModelStructure(build(shape)))  # what prevents it is a finding's problem
        for layers in options["layers"]:
            find = partial(_launches, structure, layers, options["steps"], shape.vocab)
            report.guarded(f"{f'{bits}-bit' if bits else shape.dtype}, {layers} layers", find)
        del structure, find
        mx.clear_cache()


def _launches(structure: Any, layers: int, num_steps: int, vocab_size: int) -> dict[str, Any]:
    found: ModelStructure = structure()
    step = StepModel(StageModel(found.model, 0, layers, found))
    device, sequences = open_device(0, (0, layers)), Sequences(step, vocab_size, [_PROMPT, _PROMPT])
    for _ in range(_WARM_UP):
        _timed(device, sequences, 2)
    builds, launches, steps = zip(*(_timed(device, sequences, 1) for _ in range(num_steps)), strict=True)
    _, seconds, _ = zip(*(_timed(device, sequences, 2) for _ in range(num_steps)), strict=True)
    step_ms = statistics.median(steps)
    return {
        "step_ms": step_ms,
        "build_ms": statistics.median(builds),
        "launch_ms": distribution(launches),
        "share": distribution([one / whole for one, whole in zip(launches, steps, strict=True)]),
        "second_ms": distribution(seconds),
        "second_share": statistics.median(seconds) / step_ms,
    }


def _timed(device: Device, sequences: Sequences, count: int) -> tuple[float, float, float]:
    """Of the last of ``count`` steps of different sequences, all under way at once: milliseconds of building its graph,
    of its launch, and from the beginning of that to the end of the step."""
    under_way = [start(device, sequences, [which]) for which in range(count)]
    for one in under_way:
        device.wait(one.ticket)
    last, ended = under_way[-1], time.monotonic()
    return 1e3 * (last.built - last.began), 1e3 * (last.launched - last.built), 1e3 * (ended - last.built)


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(options: Mapping[str, Any], report: ProbeReport) -> None:
    """For the first half of the layers, whose output is a hidden state, and for the whole model, whose output is
    logits."""
    shape = Shape(**options["shape"])
    model = build(shape)
    structure, half = ModelStructure(model), max(1, shape.layers // 2)
    for name, end in (("hidden states of the first half", half), ("logits", shape.layers)):
        stage = StageModel(model, 0, end, structure)
        report.guarded(f"{name}: trials", partial(_trials, stage))
        for count in options["sequences"]:
            find = partial(_together, stage, shape.vocab, count, options["steps"])
            report.guarded(f"{name}: {count} rows together", find)
        report.guarded(f"{name}: prompt in other chunks", partial(_chunks, stage, shape.vocab, options["steps"]))


def _trials(stage: StageModel) -> dict[str, Any]:
    """What loading decides, and the seconds that it takes."""
    began = time.monotonic()
    way, chosen = StepModel(stage).way, time.monotonic()
    why_not = why_no_blocks(stage)
    seconds = {"way_seconds": chosen - began, "kept_seconds": time.monotonic() - chosen}
    return {"way": way.value, "kept_kv": why_not is None, "why_not": why_not, **seconds}


def _together(stage: StageModel, vocab_size: int, count: int, num_steps: int) -> dict[str, Any]:
    """Whether the trials would allow it or not."""
    attend_by_rows(stage.whole)
    together = StepModel(stage)
    together.way = Way.ROWS
    lengths, which = [_LENGTHS[0] + _LENGTHS[1] * i for i in range(count)], range(count)
    ours, alone = (Sequences(step, vocab_size, lengths) for step in (together, StepModel(stage)))
    found, wanted = list[mx.array](), list[mx.array]()
    for _ in range(num_steps):
        found += ours.run(which)
        wanted += [row for i in which for row in alone.run([i])]
    return _compared(found, wanted, stage)


def _chunks(stage: StageModel, vocab_size: int, num_steps: int) -> dict[str, Any]:
    both = [Sequences(StepModel(stage), vocab_size, [_LONG], chunk) for chunk in _CHUNKS]
    found, wanted = ([row for _ in range(num_steps) for row in one.run([0])] for one in both)
    return _compared(found, wanted, stage)


def _compared(found: list[mx.array], wanted: list[mx.array], stage: StageModel) -> dict[str, Any]:
    """``other_token``: the share of rows whose largest logit is another one."""
    ours, theirs = mx.concatenate(found), mx.concatenate(wanted)
    errors: dict[str, Any] = distribution(row_errors(ours, theirs))
    if stage.is_last:
        others = mx.argmax(ours, axis=-1) != mx.argmax(theirs, axis=-1)
        errors["other_token"] = others.astype(mx.float32).mean().item()
    return errors


# -- until results can be sent -----------------------------------------------------------------------------------------

_UNDER_WAY = 2  # steps at a time
_CHUNK = 16  # rows of each prompt in a step
_PROMPTS = 1 << 20  # tokens: as long as these prompts, no row belongs to an answer
_WAITING = 60.0  # seconds for a step


@dataclass(frozen=True, slots=True)
class _Case:
    """Steps of one kind.

    rows: of each sequence in a step; ``drafts``: how many of them are drafts.
    codec: of the prompts' rows; the sequences are then prompts.
    unfit: whether the first sequence has values that no codec can hold, so that its rows go unpacked.
    """

    params: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    rows: int = 1
    drafts: int = 0
    codec: str = NONE
    unfit: bool = False


_FIRST = {
    "hidden states": _Case(),
    "prompts as int8": _Case(rows=_CHUNK, codec=INT8),
    "prompts as int8, one of which does not fit": _Case(rows=_CHUNK, codec=INT8, unfit=True),
}
_LAST = {"tokens": _Case(), "log-probabilities": _Case(SamplingParams(logprobs=5))}


def send(options: Mapping[str, Any], report: ProbeReport) -> None:
    """For a stage before the last (but for the first layer, so that its input can be made up), and for the last."""
    shape = Shape(**options["shape"])
    model = build(shape)
    structure, half = ModelStructure(model), max(2, shape.layers // 2)
    bounds = (0, half, shape.layers)
    for stage, start_layer, cases in ((0, 1, _FIRST), (1, half, _LAST)):
        cut = StageModel(model, start_layer, bounds[stage + 1], structure)
        runner = StageRunner(cut, stage, shape.vocab, open_device(stage, bounds))
        for name, case in cases.items():
            plan = partial(_plan, case, options["rows"], shape.vocab)
            report.guarded(name, partial(_sent, runner, plan, partial(_hidden, cut, case), case, options["steps"]))


def _sent(
    runner: StageRunner,
    make_plan: Callable[[int], StepPlan],
    make_hidden: Callable[[StepPlan], mx.array],
    case: _Case,
    num_steps: int,
) -> dict[str, Any]:
    """Milliseconds from each step's end until its result could be sent, beside those of the step."""
    runner.reset()
    runner.use_codec(case.codec)
    free, failed, sent = threading.Semaphore(_UNDER_WAY), list[Exception](), list[tuple[float, float, int]]()

    def finish(launched: Launched) -> None:
        done = runner.finish(launched)
        parts, figures = to_parts(done.hidden, done.packed), done.figures()
        until_sent, step = time.monotonic() - figures.ended, figures.ended - figures.started
        sent.append((1e3 * until_sent, 1e3 * step, parts.num_unfit))
        free.release()

    def fail(why: StepFailed) -> None:
        failed.append(why.error)
        free.release()

    steps = StepsUnderWay[Launched](fail)
    for number in range(_WARM_UP + num_steps):
        plan = make_plan(number)
        hidden = make_hidden(plan)
        if not free.acquire(timeout=_WAITING):
            raise TimeoutError(f"a step did not end in {_WAITING:g} s")
        if failed:
            break
        launched = runner.launch(plan, hidden, under_way=steps.under_way())
        steps.add(launched, runner.wait, finish, is_done=runner.device.computes_at_launch)
    steps.drain()
    if failed:
        raise failed[0]
    until_sent, step = (distribution([one[at] for one in sent[_WARM_UP:]]) for at in (0, 1))
    return {
        "until_sent_ms": until_sent,
        "step_ms": step,
        "share_of_step": until_sent["p50"] / step["p50"] if step["p50"] else None,
        "unfit_rows": sum(one[2] for one in sent),
    }


def _plan(case: _Case, num_sequences: int, vocab_size: int, number: int) -> StepPlan:
    is_prompt, which = case.codec != NONE, range(num_sequences)
    new = [NewSequence(i, case.params, i, num_prompt=_PROMPTS if is_prompt else 0) for i in which]
    tokens = [made_up(f"{number} {i}", case.rows, vocab_size) for i in which]
    logits = 0 if is_prompt else case.rows
    slices = tuple(Slice(i, number * case.rows, tokens[i], logits, case.drafts) for i in which)
    return StepPlan(number, new=() if number else tuple(new), slices=slices)


def _hidden(stage: StageModel, case: _Case, plan: StepPlan) -> mx.array:
    assert stage.hidden_spec is not None
    width, dtype = stage.hidden_spec
    rows = mx.random.normal((plan.num_tokens, width), key=mx.random.key(plan.step))
    if case.unfit:
        rows = mx.where(mx.arange(plan.num_tokens)[:, None] == 0, mx.inf, rows)
    rows = rows.astype(dtype)
    mx.eval(rows)
    return rows


# -- what MLX does there -----------------------------------------------------------------------------------------------


def rules(options: Mapping[str, Any], report: ProbeReport) -> None:
    """What a strict emulated accelerator forbids, tried: whether it goes wrong here. One that ends the process is found
    by that."""
    report.guarded("words of many heads", _words)
    report.guarded("read while in use", partial(_read_in_use, options["size"], options["rounds"]))
    report.guarded("end of a launch", partial(_end_of_launch, options["size"]))
    report.guarded("two threads wait", partial(_two_wait, options["size"], options["rounds"]))


def _words() -> dict[str, Any]:
    """Attention over KV in few bits by products with its words, against the same numbers unpacked; of each head."""
    k, v = (mx.random.normal((1, 4, 40, 64), key=mx.random.key(seed)) for seed in (1, 2))
    q = mx.random.normal((1, 8, 1, 64), key=mx.random.key(3))
    found = {}
    for name, kv_format in FORMATS.items():
        keys, values = QuantisedKVCache(kv_format).update_and_fetch(k, v)
        wanted = attention(q, keys.numbers(), values.numbers(), 0.125, None)
        found[name] = max(row_errors(over_words(q, keys, values, 0.125, None)[0, :, 0], wanted[0, :, 0]))
    return {"row_errors": found}


def _read_in_use(size: int, rounds: int) -> dict[str, Any]:
    """Read an array on the host while a launch that uses it is under way."""
    wrong = 0
    for number in range(rounds):
        x = mx.full((size,), number) + 1
        mx.eval(x)
        y = x
        for _ in range(64):
            y = y + x
        mx.async_eval(y)  # type: ignore[no-untyped-call]
        here = memory_of(x)[-1]
        wrong += here != number + 1 or bool(mx.any(y != 65 * (number + 1)).item())
    return {"rounds": rounds, "wrong": wrong}


def _end_of_launch(size: int) -> dict[str, Any]:
    """Milliseconds until a thread that waits for a small output goes on, and for a large one of the same launch."""
    large, small = mx.ones((size,)), mx.zeros((4,)) + 1
    for _ in range(64):
        large = mx.sin(large)
    began = time.monotonic()
    mx.async_eval(large, small)  # type: ignore[no-untyped-call]
    ends = []
    for array in (small, large):
        mx.eval(array)
        ends.append(1e3 * (time.monotonic() - began))
    return {"small_ms": ends[0], "large_ms": ends[1]}


def _two_wait(size: int, rounds: int) -> dict[str, Any]:
    """Have two threads wait for the same arrays, which ``Ticket.once`` prevents."""
    for number in range(rounds):
        arrays = [mx.full((size,), number) + each for each in range(16)]
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        threads = [threading.Thread(target=mx.eval, args=(arrays,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {"rounds": rounds}
