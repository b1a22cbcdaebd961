"""Times steps of a few layers on this machine's device, as a stage's steps are timed: by the stage's own runner.

Steps are plans (``core.plan``), launched and finished by ``StageRunner``; their seconds are those of its figures, from
which the scheduler learns its costs, too. On an emulated accelerator they are the accelerator's.
"""

import statistics
import time
from collections.abc import Sequence

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.selection import open_device
from splitinfer.engine.stage.launched import Launched
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.machine.spans import Span
from splitinfer.models.cut import StageModel
from splitinfer.models.openblas import use_transposed_products
from splitinfer.models.structure import ModelStructure

_PARAMS = SamplingParams(temperature=0.7)  # noise is drawn for each row, as in most chats
HELD_STEPS = 6  # launched one behind the other, to see when launches are held
_FIRST_ID = 5  # of the made-up prompts


class Trial:
    """A stage of a few layers, and its sequences of made-up rows. One thread uses it, the one that made it."""

    def __init__(self, structure: ModelStructure, span: Span, vocab_size: int) -> None:
        stage = StageModel(structure.model, span.start, span.end, structure, checks=False)
        use_transposed_products(stage.whole)
        self.device = open_device(0, (0, span.num_layers))
        self._runner = StageRunner(stage, 0, vocab_size, self.device)
        self._runner.choose_by_form()
        self._spec, self._vocab_size, self._is_last = stage.hidden_spec, vocab_size, stage.is_last
        self._num_steps = self._num_sequences = 0
        self._lengths: dict[int, int] = {}
        self.waits: list[float] = []  # from the ends of steps until the thread that waited went on
        self.has_notes = False  # of the device, on the step before: its time does not count

    def open(self, count: int) -> list[int]:
        """Open sequences; they come to be with their first step."""
        first, self._num_sequences = self._num_sequences, self._num_sequences + count
        return list(range(first, self._num_sequences))

    def step(self, sequences: Sequence[int], rows: int) -> tuple[Shape, float]:
        """Compute a step of so many rows of each sequence; its shape and its seconds."""
        while self._runner.prepare_next():
            pass
        plan = self._plan(sequences, rows)
        _, seconds = self._finish(self._launch(plan))
        return Shape.of(plan.slices), seconds

    def close(self) -> None:
        self._lengths.clear()
        self._runner.reset()

    def held(self) -> tuple[float, float]:
        """Launch steps of one row each, one behind the other; how long the launches took, and how long all steps."""
        sequences = [self.open(1) for _ in range(HELD_STEPS)]
        for own in sequences:
            self.step(own, 2)
        launched = list[Launched]()
        for own in sequences:
            launched.append(self._launch(self._plan(own, 1), launched))
        returned = time.monotonic()
        spans = [self._finish(each)[0] for each in launched]
        return returned - spans[0][0], spans[-1][1] - spans[0][0]

    def wait(self) -> float:
        """Seconds from the end of a step until a thread that waits for it goes on."""
        return max(0.0, statistics.median(self.waits)) if self.waits else 0.0

    def _plan(self, sequences: Sequence[int], rows: int) -> StepPlan:
        new = tuple(NewSequence(i, _PARAMS, seed=i, num_prompt=1) for i in sequences if i not in self._lengths)
        slices = []
        for i in sequences:
            start = self._lengths.get(i, 0)
            ids = tuple((_FIRST_ID + 7 * at + 31 * i) % self._vocab_size for at in range(start, start + rows))
            slices.append(Slice(i, start, ids, 1))
            self._lengths[i] = start + rows
        self._num_steps += 1
        return StepPlan(self._num_steps, new=new, slices=tuple(slices))

    def _launch(self, plan: StepPlan, under_way: Sequence[Launched] = ()) -> Launched:
        return self._runner.launch(plan, self._hidden(plan.num_tokens), under_way=under_way)

    def _finish(self, launched: Launched) -> tuple[tuple[float, float], float]:
        """When a step started and ended, and its seconds."""
        span = self._runner.wait(launched)
        self.waits.append(time.monotonic() - span.ended)
        figures = self._runner.finish(launched).figures
        self.has_notes = bool(figures.notes)
        return (figures.started, figures.ended), figures.ended - figures.started - figures.copying

    def _hidden(self, rows: int) -> mx.array | None:
        """Made-up hidden states [rows, d]; ``None`` on the first stage."""
        if self._spec is None:
            return None
        width, dtype = self._spec
        hidden = mx.random.normal((rows, width)).astype(dtype)
        mx.eval(hidden)
        return hidden
