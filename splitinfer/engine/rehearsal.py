"""Doing what comes next once before it is due, with things of its own, so that the processor has the code at hand.

A loop whose device computes sleeps for most of a step, and what Python runs after that is cold: reading a message takes
a hundred microseconds in place of five, planning two hundred in place of fifty (``scripts/README.md``). All of it is on
the way from one stage's step to the next. What comes is known, though: a message is read, a step is planned, a message
is written. All of that is pure, so it may be done twice, and nothing is left of it. When it is due is known by the
waits before (``When``).
"""

import time
from collections import deque
from contextlib import suppress
from dataclasses import replace

from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StageFigures, StepPlan, StepResult, TensorSpec
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams, Sequence
from splitinfer.wire import codec
from splitinfer.wire.messages import Message, Result, Step
from transports import LinkOptions
from transports.framing import Kind
from transports.framing import decode as unpack
from transports.framing import encode as pack

AHEAD = 0.0012  # seconds: later, what comes early would wait; earlier, more of it is forgotten again
_LEAST = 0.001  # seconds of a wait that are left for sleeping
_ALIKE = 3  # waits before
_TOKENS = 12  # of a made-up answer: fewer than the scheduler learns from at once
_ROWS, _OPTIONS = TensorSpec("float32", (1, 1)), LinkOptions()


class When:
    """When to rehearse: shortly before the shortest of the last waits would end."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=_ALIKE)

    def waited(self, seconds: float) -> None:
        """Learn from a wait."""
        self._waits.append(seconds)

    @property
    def after(self) -> float | None:
        """After how many seconds of the next wait; ``None``: waits are too few, or too short."""
        after = min(self._waits, default=0.0) - AHEAD
        return after if len(self._waits) == _ALIKE and after >= _LEAST else None


class OfLoop:
    """Rehearses a coordinator's loop, from a result's message to the next step's. ``config``: of its scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = replace(config, blocks=replace(config.blocks, kept=()))  # not what is on disks
        self._figures = tuple(_figures(stage) for stage in range(config.num_stages or config.num_groups))
        self._begin()

    def _begin(self) -> None:
        """Have one request that decodes, and nothing else."""
        self._scheduler, self._left = Scheduler(self._config), _TOKENS
        params = SamplingParams(max_tokens=2 * _TOKENS, ignore_eos=True)
        with suppress(NeverFits):
            self._scheduler.add(Sequence(0, [0], params, seed=0))
        self._plan = self._next()

    def _next(self) -> StepPlan | None:
        """The step's plan; ``None``: the sequence has ended, or there is no room for it."""
        plan = self._scheduler.schedule(time.monotonic())
        return plan if plan is not None and plan.slices else None

    def __call__(self) -> None:
        """Read a result, plan, write the step's message."""
        if self._plan is None or not self._left:
            self._begin()
        if self._plan is None:
            return  # these stages have no room for it
        result = Result(StepResult(self._plan.step, (SampledSlice(0, (SampledToken(0),)),), self._figures))
        read = _crossed(result)
        assert isinstance(read, Result)
        self._scheduler.update(read.result, time.monotonic(), learn=False)
        self._plan, self._left = self._next(), self._left - 1
        if self._plan is not None:
            _crossed(Step(self._plan, _ROWS))


def of_worker() -> None:
    """Rehearse a worker's loop: read a step's message, write a result's."""
    _crossed(Step(StepPlan(0, slices=(Slice(0, 1, (0,), 1),)), _ROWS))
    _crossed(Result(StepResult(0, (SampledSlice(0, (SampledToken(0),)),), (_figures(0),))))


def _crossed(message: Message) -> Message:
    """A message as it comes from a link."""
    return codec.decode(unpack(pack(Kind.DATA, seq=0, header=codec.encode(message)), _OPTIONS).header)


def _figures(stage: int) -> StageFigures:
    return StageFigures(stage, 0.0, 0.0, rows=1)
