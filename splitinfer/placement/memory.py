"""Whether a cut fits: bytes of each stage, counted as a coordinator counts them when it loads and admits.

A stage with F bytes free, W of weights (the coordinator's drafter among them) and K of KV fits if

    W + KV of one sequence + its scores + margin  <=  F              it is loaded (``models.memory.check_fit``)
    K of all sequences  <=  share (F - W)                            they are admitted (``llm.setup``)

``F`` is what is left of the free bytes beside those to be spared. Stages on one machine (the coordinator's and those
at ``local``) have its bytes together, and equal parts for KV. What a pool of stages *lacks* are the further free bytes
with which both would hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

from splitinfer.core.kv.budget import BLOCK, STAGE_MARGIN, KVUse, StageKV, use_of
from splitinfer.core.kv.growth import spare
from splitinfer.core.layout import LOCAL
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut


@dataclass(frozen=True, slots=True)
class StageBytes:
    """A stage's memory: bytes of its weights, of KV for each token and each sequence, and of scores for each token of
    context."""

    weights: int
    kv_per_token: int
    kv_fixed: int
    scores: int = 0

    def kv(self, use: KVUse) -> int:
        """Bytes of KV."""
        return StageKV(0, self.kv_per_token, self.kv_fixed).bytes_of(use)

    def to_load(self, context: int) -> int:
        """Bytes that a stage wants to see free for a context, the margin left out."""
        kv = self.kv_fixed + self.kv_per_token * (context + spare(context))
        return self.weights + kv + self.scores * context


class Memory:
    """The memory of every cut of ``profiles``."""

    def __init__(self, profiles: Profiles, asked: Asked) -> None:
        self._model, self._machines, self._asked = profiles.model, profiles.machines, asked
        layers = self._model.layers
        self._weights = _sums(layer.weights for layer in layers)
        self._per_token = _sums(layer.kv_per_token for layer in layers)
        self._fixed = _sums(layer.kv_fixed for layer in layers)
        self._free = [max(0, machine.free_bytes - asked.spare_bytes) for machine in self._machines]
        self._is_here = [i == 0 or machine.address == LOCAL for i, machine in enumerate(self._machines)]

    def free(self, machine: int) -> int:
        """Bytes that a machine's stage may take, without those to be spared."""
        return self._free[machine]

    def stage(self, machine: int, start: int, end: int, context: int = 0) -> StageBytes:
        """The bytes of the layers [start, end) on a machine. ``context``: for the drafter's KV."""
        weights = self._weights[end] - self._weights[start] + self._model.beside_layers(start, end)
        draft = self._model.draft
        if start == 0 and draft is not None and self._asked.acceptance is not None:
            weights += draft.weights + draft.kv_per_token * context
        return StageBytes(
            weights,
            self._per_token[end] - self._per_token[start],
            self._fixed[end] - self._fixed[start],
            self._machines[machine].scores,
        )

    def lacks(self, cut: Cut, context: int, sequences: int) -> list[int]:
        """The bytes that each machine of a cut lacks for so many sequences of ``context`` tokens; 0 or fewer: none, and
        so many are left. Stages of one machine have the same number."""
        use = _use(context, sequences)
        stages = [(m, self.stage(m, start, end, context)) for m, start, end in cut.stages()]
        here = [own for m, own in stages if self._is_here[m]]
        shared = self._lack(here, self._free[0], use, context)
        return [shared if self._is_here[m] else self._lack([own], self._free[m], use, context) for m, own in stages]

    def lack(self, machine: int, start: int, end: int, context: int, sequences: int) -> int:
        """The same for a machine with one stage, of the layers [start, end)."""
        own = self.stage(machine, start, end, context)
        return self._lack([own], self._free[machine], _use(context, sequences), context)

    def _lack(self, stages: Sequence[StageBytes], free: int, use: KVUse, context: int) -> int:
        """What stages that share ``free`` bytes lack."""
        if not stages:
            return 0
        weights = sum(own.weights for own in stages)
        to_load = sum(own.to_load(context) + STAGE_MARGIN for own in stages)
        kv = len(stages) * max(own.kv(use) for own in stages)
        return max(to_load, weights + ceil(kv / self._asked.kv_share)) - free

    def fits(self, cut: Cut, context: int, sequences: int) -> bool:
        """Whether so many sequences of ``context`` tokens fit."""
        return max(self.lacks(cut, context, sequences)) <= 0

    def longest(self, cut: Cut, sequences: int = 1) -> int:
        """The most tokens of each of so many sequences that fit, in whole blocks, or the model's own context; 0: the
        cut does not fit at all."""
        most = self._model.context_length
        if self.fits(cut, most, sequences):
            return most
        low, high = 0, -(-most // BLOCK)  # in blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(cut, middle * BLOCK, sequences) else (low, middle)
        return low * BLOCK


def _use(context: int, sequences: int) -> KVUse:
    one = use_of(context)
    return KVUse(one.sequences * sequences, one.tokens * sequences)


def _sums(values: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0))
