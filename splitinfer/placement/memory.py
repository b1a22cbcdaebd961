"""Computes whether a cut fits: the bytes of each stage, counted as a coordinator counts them when it loads and admits.

A stage with F bytes free, W of weights (with the drafter's, if it has it) and K of KV fits if

    W + KV of one sequence + its scores + margin  <=  F              it is loaded (``models.memory.check_fit``)
    K of all sequences  <=  share (F - W)                            they are admitted (``llm.setup``)

``F`` is the free bytes without the bytes to spare. Stages on one machine (the coordinator's and those at ``local``)
share its bytes, with equal parts for KV. A machine *lacks* the further free bytes that would make both hold.
"""

from collections.abc import Iterable
from itertools import accumulate
from math import ceil

from splitinfer.core.kv.budget import BLOCK, STAGE_MARGIN, KVBudget, KVUse, StageKV
from splitinfer.core.kv.growth import spare
from splitinfer.core.layout import LOCAL
from splitinfer.machine.profile import ModelProfile, Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut


class Memory:
    """The memory of every cut of ``profiles``."""

    def __init__(self, profiles: Profiles, asked: Asked) -> None:
        self._model, self._machines, self._asked = profiles.model, profiles.machines, asked
        self._whole = _Layers(self._model)
        self._half = self._whole if self._model.half is None else _Layers(self._model.half)
        self._host_of = {each.name: 0 if each.address == LOCAL else i for i, each in enumerate(self._machines)}

    def weights(self, start: int, end: int, context: int = 0, *, is_half: bool = False) -> int:
        """Return the bytes of the weights of the layers [start, end), or of a rank's half of them. If the stage has a
        drafter, add its weights and its KV of ``context`` tokens."""
        weights = (self._half if is_half else self._whole).bytes_of(start, end)
        if self._asked.acceptance is None:
            return weights
        own, per_token = self._model.drafter(start, end)
        return weights + own + per_token * context

    def lacks(self, cut: Cut, context: int, sequences: int) -> dict[int, int]:
        """Return the bytes that each machine of a cut, by its place, lacks for ``sequences`` sequences of ``context``
        tokens. A negative number of bytes is left over. Stages on the coordinator's machine count as its own. Experts
        that stay on disk do not count (``in_memory``)."""
        found, on_disk = self._lacks(cut, context, sequences), self._on_disk(cut)
        return {host: lack - on_disk.get(host, 0) for host, lack in found.items()}

    def in_memory(self, cut: Cut) -> list[float]:
        """Return the share of each stage's experts that has room in memory, beside one sequence of the context that is
        asked for."""
        lacks, on_disk = self._lacks(cut, self._asked.context, 1), self._on_disk(cut)
        share = {host: min(1.0, max(0.0, 1 - lacks[host] / most)) for host, most in on_disk.items() if most}
        return [share.get(host, 1.0) for host in self._hosts(cut)]

    def _on_disk(self, cut: Cut) -> dict[int, int]:
        """Return the bytes of experts that may stay on disk on each machine of a cut, by its place, if the speed of its
        disk is known. Each stage keeps those of two tokens. Return nothing if a sequence of the context that is asked
        for fits beside all of them, because then all are in memory."""
        found = dict[int, int]()
        for (machine, start, end), host in zip(cut.stages(), self._hosts(cut), strict=True):
            profile, (experts, chosen) = self._machines[machine], self._model.experts(start, end)
            if profile.disk and not profile.across:
                found[host] = found.get(host, 0) + max(0, experts - 2 * chosen)
        is_needed = any(found.values()) and max(self._lacks(cut, self._asked.context, 1).values()) > 0
        return found if is_needed else {}

    def _hosts(self, cut: Cut) -> list[int]:
        return [self._host_of[self._machines[machine].ranks[0]] for machine, _, _ in cut.stages()]

    def _lacks(self, cut: Cut, context: int, sequences: int) -> dict[int, int]:
        one = KVBudget().use_of(context)
        use = KVUse(one.sequences * sequences, one.tokens * sequences)
        weights, to_load, kv = dict[int, int](), dict[int, int](), dict[int, list[int]]()
        for machine, start, end in cut.stages():
            profile = self._machines[machine]
            own = self.weights(start, end, context, is_half=bool(profile.across))
            fixed, per_token = (self._half if profile.across else self._whole).kv_of(start, end)
            alone = fixed + per_token * (context + spare(context)) + profile.scores * context
            for host in (self._host_of[name] for name in profile.ranks):
                weights[host] = weights.get(host, 0) + own
                to_load[host] = to_load.get(host, 0) + own + alone + STAGE_MARGIN
                kv.setdefault(host, []).append(StageKV(0, per_token, fixed).bytes_of(use))
        return {
            host: max(to_load[host], own + ceil(len(kv[host]) * max(kv[host]) / self._asked.kv_share))
            - max(0, self._machines[host].free_bytes - self._asked.spare_bytes)
            for host, own in weights.items()
        }

    def fits(self, cut: Cut, context: int, sequences: int) -> bool:
        """Return whether ``sequences`` sequences of ``context`` tokens fit."""
        return max(self.lacks(cut, context, sequences).values()) <= 0

    def longest(self, cut: Cut) -> int:
        """Return the most tokens of one sequence that fit, in whole blocks, or the model's whole context. Return 0 if
        the cut does not fit at all."""
        most = self._model.context_length
        if self.fits(cut, most, 1):
            return most
        low, high = 0, -(-most // BLOCK)  # in blocks: low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(cut, middle * BLOCK, 1) else (low, middle)
        return low * BLOCK


class _Layers:
    """The bytes of a model's layers, or of a rank's half of them."""

    def __init__(self, model: ModelProfile) -> None:
        self._model = model
        self._weights = _sums(layer.weights for layer in model.layers)
        self._per_token = _sums(layer.kv_per_token for layer in model.layers)
        self._fixed = _sums(layer.kv_fixed for layer in model.layers)

    def bytes_of(self, start: int, end: int) -> int:
        """Return the bytes of the weights of a stage of the layers [start, end)."""
        return self._weights[end] - self._weights[start] + self._model.beside_layers(start, end)

    def kv_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the layers' KV: for a sequence of any length, and for each token."""
        return self._fixed[end] - self._fixed[start], self._per_token[end] - self._per_token[start]


def _sums(values: Iterable[int]) -> list[int]:
    """Return the sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=0))
