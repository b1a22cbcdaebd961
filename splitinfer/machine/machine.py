"""A machine: the seconds of stages, links, drafts and the coordinator's own work, and what the devices are like.

``splitinfer bench --mode serve`` measures and prints them; for machines that one does not have they are described. A
machine can be simulated (``sim``), and emulated: a device with its times computes real models (``engine.device``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.core.scheduler.cost_model import StageCosts
from splitinfer.machine.device_queue import DeviceTraits


@dataclass(frozen=True, slots=True)
class Hop:
    """The way from a stage to the next, or from the last one back: seconds for each step, and for each of its rows."""

    fixed: float = 0.0
    per_row: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds for a step of so many rows."""
        return self.fixed + self.per_row * rows


@dataclass(frozen=True, slots=True)
class Machine:
    """A pipeline.

    stages: the costs of steps on each stage.
    hops: the hop after each stage.
    layers: the number of layers of each stage.
    host: seconds of the coordinator for each step, beside computing.
    draft: seconds for each draft, on the first stage's device.
    launches_ahead: whether the devices compute while their hosts go on, as GPUs do.
    buffers: the command buffers of a step on each stage; empty: one.
    device: what the devices are like.

    Raises:
        ValueError: the parts contradict each other, or a time is negative.
    """

    stages: tuple[StageCosts, ...]
    hops: tuple[Hop, ...]
    layers: tuple[int, ...]
    host: float = 0.0
    draft: float = 0.0
    launches_ahead: bool = False
    buffers: tuple[int, ...] = ()
    device: DeviceTraits = DeviceTraits()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not self.stages or not len(self.stages) == len(self.hops) == len(self.layers):
            raise ValueError(
                f"{len(self.stages)} stages have {len(self.hops)} hops and {len(self.layers)} layer counts"
            )
        if self.buffers and (len(self.buffers) != len(self.stages) or min(self.buffers) < 1):
            raise ValueError(f"{len(self.stages)} stages have the numbers of command buffers {list(self.buffers)}")
        if min(self.layers) < 1:
            raise ValueError(f"each stage needs a layer, but they have {self.layers}")
        times = (self.host, self.draft, *(x for hop in self.hops for x in (hop.fixed, hop.per_row)))
        if not all(0 <= x < math.inf for x in times):
            raise ValueError("host, draft and hops must be seconds, none negative")

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def cut(self) -> str:
        """The layers of each stage, as in a layout's name: ``40-26``."""
        return "-".join(map(str, self.layers))

    def cut_into(self, layers: Sequence[int]) -> "Machine":
        """The same machine with other numbers of layers; the costs of a stage are proportional to them.

        Raises:
            ValueError: another number of stages or of layers in all.
        """
        if len(layers) != self.num_stages or sum(layers) != sum(self.layers):
            raise ValueError(f"{list(layers)} is no cut of {sum(self.layers)} layers into {self.num_stages} stages")
        pairs = zip(self.stages, self.layers, layers, strict=True)
        return replace(self, stages=tuple(s.scaled(new / old) for s, old, new in pairs), layers=tuple(layers))

    def with_hop(self, seconds: float) -> "Machine":
        """The same machine with hops of ``seconds`` for each step."""
        return replace(self, hops=tuple(replace(hop, fixed=seconds) for hop in self.hops))

    def as_dict(self) -> dict[str, Any]:
        """The machine as plain numbers, for ``from_dict``."""
        return {
            "stages": [stage.as_dict() for stage in self.stages],
            "hops": [[hop.fixed, hop.per_row] for hop in self.hops],
            "layers": list(self.layers),
            "host": self.host,
            "draft": self.draft,
            "launches_ahead": self.launches_ahead,
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Machine":
        """The machine that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` is no description of a machine.
        """
        try:
            return cls(
                tuple(StageCosts.from_dict(stage) for stage in numbers["stages"]),
                tuple(Hop(float(fixed), float(per_row)) for fixed, per_row in numbers["hops"]),
                tuple(int(count) for count in numbers["layers"]),
                float(numbers.get("host", 0.0)),
                float(numbers.get("draft", 0.0)),
                bool(numbers.get("launches_ahead", False)),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"this is no description of a machine ({type(error).__name__}: {error})") from error
