"""The graph of one step: what a device is given to compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from splitinfer.engine.stage.row import Row
from splitinfer.engine.stage.sampler import Choice
from splitinfer.engine.stage.scores import Scores
from splitinfer.models.hidden_states import PackedRows


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The arrays of a step, not yet evaluated.

    hidden: [T, d] for the next stage; ``None`` on the last one.
    packed: the rows of them that cross the link in fewer bytes.
    rows, choices: on the last stage, the rows that want logits, and what is chosen for them.
    pending: arrays that the step writes, and that only later steps read.
    scores: on the last stage, the log probabilities of prompts' tokens.
    """

    hidden: mx.array | None
    packed: PackedRows | None
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...]
    pending: Sequence[mx.array]
    scores: tuple[Scores, ...] = ()

    def without_pending(self) -> "StepGraph":
        """The same without ``pending``: whoever held these arrays would make the next step copy them."""
        return replace(self, pending=())

    def outputs(self, also: Sequence[mx.array] = ()) -> list[mx.array]:
        """Make the list of the arrays that are read when the step is done. One element of the last array written is
        among them, which is evaluated when all is: holding that array itself would make the next step copy it instead
        of writing in place. ``also``: arrays written beside the graph, before its own.
        """
        found = [] if self.hidden is None else [self.hidden]
        found += [] if self.packed is None else self.packed.arrays()
        for choice in self.choices:
            found += choice.arrays()
        found += [scores.logprobs for scores in self.scores]
        return found + [corner(array) for array in [*also, *self.pending][-1:]]


def corner(array: mx.array) -> mx.array:
    """One new element that depends on all of ``array``."""
    piece = array[tuple(slice(0, 1) for _ in array.shape)]
    return piece + piece
