"""Costs that are given, and not learned from steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.stage import LEAST_MARGIN, StageCosts, _Place


class GivenStage(StageCosts):
    """``seconds`` by number of rows, interpolated; and for each position that single rows and rows of chunks attend
    to."""

    def __init__(self, seconds: Mapping[int, float], decode: float = 0.0, chunk: float = 0.0) -> None:
        places = {math.floor(rows): _Place(rows, each, count=1) for rows, each in seconds.items()}
        super().__init__(99, 2**20, 2**62, 2**62, _places=places)
        self.decode, self.chunk = decode, chunk


def line(base: float, per_row: float, decode: float = 0.0, chunk: float = 0.0) -> GivenStage:
    return GivenStage({0: base, 1: base + per_row}, decode, chunk)


class GivenCosts(CostModel):
    """Costs that ``learn`` does not change, and that no step exceeds by more than the least margin."""

    def __init__(self, stages: Sequence[StageCosts], hop: float = 0.0, **more: Any) -> None:
        super().__init__(list(stages), hop, **more)
        for each in stages:
            each._off.extend([LEAST_MARGIN] * 64)

    def learn(self, *_args: object, **_named: object) -> None:
        pass

    def drafted(self, *_args: object) -> None:
        pass
