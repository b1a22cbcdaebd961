"""Times steps of a few layers on this machine's device, as a stage's steps are timed: by the stage's own runner.

Steps are plans (``core.plan``), launched and finished by ``StageRunner``; their seconds are those of its figures, from
which the scheduler learns its costs, too. On an emulated accelerator they are the accelerator's.
"""

from collections.abc import Sequence

import mlx.core as mx

from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.selection import open_device
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.models.cut import StageModel
from splitinfer.models.openblas import use_transposed_products
from splitinfer.models.structure import ModelStructure

_PARAMS = SamplingParams(temperature=0.7)  # noise is drawn for each row, as in most chats
_FIRST_ID = 5  # of the made-up prompts


class Trial:
    """A stage of a few layers, and its sequences of made-up rows. One thread uses it, the one that made it.
    ``num_ranks``: that have these layers together."""

    def __init__(self, structure: ModelStructure, span: tuple[int, int], vocab_size: int, num_ranks: int = 1) -> None:
        stage = StageModel(structure.model, *span, structure, checks=False)
        use_transposed_products(stage.whole)
        self.device = open_device(0, (0, span[1] - span[0]), num_ranks, sums=False)
        self._runner = StageRunner(stage, 0, vocab_size, self.device)
        self._runner.choose_by_form()
        self._spec, self._vocab_size = stage.hidden_spec, vocab_size
        self._num_steps = self._num_sequences = 0
        self._lengths: dict[int, int] = {}

    def open(self, count: int) -> list[int]:
        """Open sequences; they come to be with their first step."""
        first, self._num_sequences = self._num_sequences, self._num_sequences + count
        return list(range(first, self._num_sequences))

    def step(self, sequences: Sequence[int], rows: int) -> float:
        """Compute a step of so many rows of each sequence; its seconds."""
        while self._runner.prepare_next():
            pass
        plan = self._plan(sequences, rows)
        launched = self._runner.launch(plan, self._hidden(plan.num_tokens))
        self._runner.wait(launched)
        figures = self._runner.finish(launched).figures
        return figures.ended - figures.started - figures.copying

    def close(self) -> None:
        """Forget all sequences."""
        self._lengths.clear()
        self._runner.reset()

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

    def _hidden(self, rows: int) -> mx.array | None:
        """Made-up hidden states [rows, d]; ``None`` on the first stage."""
        if self._spec is None:
            return None
        width, dtype = self._spec
        hidden = mx.random.normal((rows, width)).astype(dtype)
        mx.eval(hidden)
        return hidden
