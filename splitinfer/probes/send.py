"""From the end of a step on the device until its results are ready to be sent, while the next step is under way.

Whatever is computed for a result after its step stands in line behind the next one. The loops of coordinator and worker
are imitated: one thread launches, at most two steps are under way, and where the device does not compute at launch
another thread waits, finishes, reduces to what is still wanted and makes the parts of the frame.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from splitinfer.bench.shared.random_model import Shape, build
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.wire_codec import INT8, NONE
from splitinfer.engine.device.late_steps import LATE
from splitinfer.engine.device.selection import open_device
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.stage.runner import Launched, StageRunner
from splitinfer.models.cut import StageModel
from splitinfer.models.hidden_states import to_parts
from splitinfer.models.structure import ModelStructure
from splitinfer.probes.child import Report
from splitinfer.probes.steps import distribution

_WARM_UP = 4  # steps
_UNDER_WAY = 2  # steps at a time
_CHUNK = 16  # rows of each prompt in a step
_PROMPTS = 1 << 20  # tokens: as long as these prompts, no row belongs to an answer
_WAITING = 60.0  # seconds for a step


@dataclass(frozen=True, slots=True)
class _Case:
    """Steps of one kind.

    rows: of each sequence in a step; ``drafts``: how many of them are drafts.
    wanted: reduces a plan to what is still wanted when it is done.
    codec: of the prompts' rows; the sequences are then prompts.
    unfit: whether the first sequence has values that no codec can hold, so that its rows go unpacked.
    """

    params: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    rows: int = 1
    drafts: int = 0
    wanted: Callable[[StepPlan], StepPlan] = lambda plan: plan
    codec: str = NONE
    unfit: bool = False


def _every_other(plan: StepPlan) -> StepPlan:
    return replace(plan, slices=plan.slices[::2])


_FIRST = {
    "hidden states": _Case(),
    "drafts, every other slice void": _Case(rows=4, drafts=3, wanted=_every_other),
    "prompts as int8": _Case(rows=_CHUNK, codec=INT8),
    "prompts as int8, one of which does not fit": _Case(rows=_CHUNK, codec=INT8, unfit=True),
}
_LAST = {"tokens": _Case(), "log-probabilities": _Case(SamplingParams(logprobs=5))}


def measure(options: Mapping[str, Any], report: Report) -> None:
    """For a stage before the last (but for the first layer, so that its input can be made up), and for the last."""
    shape = Shape(**options["shape"])
    model = build(shape)
    structure = ModelStructure(model)
    half = max(2, shape.layers // 2)
    bounds = (0, half, shape.layers)
    for stage, start, cases in ((0, 1, _FIRST), (1, half, _LAST)):
        cut = StageModel(model, start, bounds[stage + 1], structure)
        runner = StageRunner(cut, stage, shape.vocab, open_device(stage, bounds))
        for name, case in cases.items():
            find = partial(_run, runner, cut, case, options["rows"], options["steps"], shape.vocab)
            report.guarded(name, find)


def _run(
    runner: StageRunner, stage: StageModel, case: _Case, num_sequences: int, num_steps: int, vocab_size: int
) -> dict[str, Any]:
    runner.reset()
    runner.use_codec(case.codec)
    line = _Line(runner, case.wanted)
    for number in range(_WARM_UP + num_steps):
        plan = _plan(number, case, num_sequences, vocab_size)
        line.launch(plan, _hidden(stage, plan, case))
    return line.figures()


class _Line:
    """The steps of a stage, launched and sent as by the engine's loop. ``times``: for each step, seconds from its end
    until it could be sent, and seconds that it took."""

    def __init__(self, runner: StageRunner, wanted: Callable[[StepPlan], StepPlan]) -> None:
        self._runner, self._wanted = runner, wanted
        self._free = threading.Semaphore(_UNDER_WAY)
        self._failed: list[Exception] = []
        self._times: list[tuple[float, float]] = []
        self._unfit = self._late = 0
        self._steps = StepsUnderWay(runner.wait, self._send, self._fail)

    def launch(self, plan: StepPlan, hidden: mx.array) -> None:
        """Launch a step when there is room for it."""
        if not self._free.acquire(timeout=_WAITING):
            raise TimeoutError(f"a step did not end in {_WAITING:g} s")
        self._check()
        launched = self._runner.launch(plan, hidden)
        self._steps.add(launched, is_done=self._runner.device.computes_at_launch)

    def _send(self, launched: Launched) -> None:
        done = self._runner.finish(launched)
        wanted = done.reduced_to(self._wanted(done.plan))
        sent = to_parts(wanted.hidden, wanted.packed)
        figures = done.figures
        self._times.append((time.monotonic() - figures.ended, figures.ended - figures.started))
        self._unfit += sent.num_unfit
        self._late += LATE in figures.notes
        self._free.release()

    def _fail(self, why: StepFailed) -> None:
        self._failed.append(why.error)
        self._free.release()

    def _check(self) -> None:
        if self._failed:
            raise self._failed[0]

    def figures(self) -> dict[str, Any]:
        """Wait for all steps; milliseconds."""
        self._steps.drain()
        self._check()
        times = self._times[_WARM_UP:]
        step = distribution([1e3 * seconds for _, seconds in times])
        until_sent = distribution([1e3 * seconds for seconds, _ in times])
        share = until_sent["p50"] / step["p50"] if step["p50"] else None
        return {
            "until_sent_ms": until_sent,
            "step_ms": step,
            "share_of_step": share,
            "unfit_rows": self._unfit,
            "late_steps": self._late,
        }


def _plan(number: int, case: _Case, num_sequences: int, vocab_size: int) -> StepPlan:
    """The next rows of all sequences."""
    is_prompt = case.codec != NONE
    new = [NewSequence(i, case.params, i, num_prompt=_PROMPTS if is_prompt else 0) for i in range(num_sequences)]
    start, logits = number * case.rows, 0 if is_prompt else case.rows
    slices = [
        Slice(i, start, made_up(f"{number} {i}", case.rows, vocab_size), logits, case.drafts)
        for i in range(num_sequences)
    ]
    return StepPlan(number, new=() if number else tuple(new), slices=tuple(slices))


def _hidden(stage: StageModel, plan: StepPlan, case: _Case) -> mx.array:
    assert stage.hidden_spec is not None
    width, dtype = stage.hidden_spec
    rows = mx.random.normal((plan.num_tokens, width), key=mx.random.key(plan.step))
    if case.unfit:
        rows = mx.where(mx.arange(plan.num_tokens)[:, None] == 0, mx.inf, rows)
    rows = rows.astype(dtype)
    mx.eval(rows)
    return rows
