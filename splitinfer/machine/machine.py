"""A machine: the seconds of stages, links, drafts and the coordinator's own work, and what the devices are like.

``splitinfer bench --mode serve`` measures and prints them; for machines that one does not have they are described. A
machine can be simulated (``sim``), and emulated: a device with its times computes real models (``engine.device``).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
class EachLayer:
    """The costs of a stage by the number of its layers, so that any cut can be tried.

    layer: the costs of a step on one layer.
    step: seconds of a step on any stage, whatever layers it has.
    buffers: command buffers of a step, for each layer.

    Raises:
        ValueError: a number is out of its range.
    """

    layer: StageCosts
    step: float = 0.0
    buffers: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.step < math.inf and 0 < self.buffers < math.inf):
            raise ValueError("a step takes no negative time beside its layers, and a layer takes command buffers")

    def stage(self, num_layers: int) -> StageCosts:
        """The costs of a stage of so many layers."""
        costs = self.layer.scaled(num_layers)
        costs.coefficients[0] += self.step
        return costs

    def stage_buffers(self, num_layers: int) -> int:
        """The command buffers of a step on so many layers."""
        return max(1, round(self.buffers * num_layers))

    def as_dict(self) -> dict[str, Any]:
        """The costs as plain numbers, for ``from_dict``."""
        return {"layer": self.layer.as_dict(), "step": self.step, "buffers": self.buffers}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "EachLayer":
        """The costs that ``as_dict`` returned.

        Raises:
            ValueError: a number is out of its range.
        """
        return cls(StageCosts.from_dict(numbers["layer"]), float(numbers["step"]), float(numbers["buffers"]))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One stage's device, as its emulation needs it.

    costs: seconds by the shape of a step.
    buffers: the command buffers of a step.
    traits: what the device is like.
    draft, draft_buffers: seconds and command buffers of a draft, which only the first stage's device makes.
    draft_more: seconds for each further sequence in a round of drafts.
    """

    costs: StageCosts
    buffers: int
    traits: DeviceTraits
    draft: float = 0.0
    draft_buffers: int = 1
    draft_more: float = 0.0

    def draft_round(self, sequences: int) -> float:
        """Seconds of a round of drafts for so many sequences."""
        return self.draft + self.draft_more * (sequences - 1)


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
    draft_buffers: the command buffers of a draft.
    each_layer: the costs of stages of any number of layers; ``None``: they are proportional to the layers.
    draft_more: seconds for each further sequence in a round of drafts, which are made together.

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
    draft_buffers: int = 1
    each_layer: EachLayer | None = None
    draft_more: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages or not len(self.stages) == len(self.hops) == len(self.layers):
            raise ValueError(
                f"{len(self.stages)} stages have {len(self.hops)} hops and {len(self.layers)} layer counts"
            )
        if self.buffers and (len(self.buffers) != len(self.stages) or min(self.buffers) < 1):
            raise ValueError(f"{len(self.stages)} stages have the numbers of command buffers {list(self.buffers)}")
        if self.draft_buffers < 1:
            raise ValueError(f"a draft has at least one command buffer, not {self.draft_buffers}")
        if min(self.layers) < 1:
            raise ValueError(f"each stage needs a layer, but they have {self.layers}")
        times = (self.host, self.draft, self.draft_more, *(x for hop in self.hops for x in (hop.fixed, hop.per_row)))
        if not all(0 <= x < math.inf for x in times):
            raise ValueError("host, draft and hops must be seconds, none negative")

    def draft_round(self, sequences: int) -> float:
        """Seconds of a round of drafts for so many sequences."""
        return self.draft + self.draft_more * (sequences - 1)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def wait(self) -> float:
        """Seconds from the end of a step until it goes on its way."""
        return self.device.wait if self.launches_ahead else 0.0

    @property
    def cut(self) -> str:
        """The layers of each stage, as in a layout's name: ``40-26``."""
        return "-".join(map(str, self.layers))

    def cut_into(self, layers: Sequence[int]) -> "Machine":
        """The same machine with other numbers of layers. The costs of a stage are those of its layers, where the costs
        of each layer are known, and else proportional to them.

        Raises:
            ValueError: another number of stages or of layers in all.
        """
        if len(layers) != self.num_stages or sum(layers) != sum(self.layers):
            raise ValueError(f"{list(layers)} is no cut of {sum(self.layers)} layers into {self.num_stages} stages")
        new = [self._stage_of(stage, count) for stage, count in enumerate(layers)]
        stages, buffers = tuple(costs for costs, _ in new), tuple(count for _, count in new)
        return replace(self, stages=stages, layers=tuple(layers), buffers=buffers if self.buffers else ())

    def _stage_of(self, stage: int, num_layers: int) -> tuple[StageCosts, int]:
        """A stage's costs and command buffers, had it so many layers."""
        if self.each_layer is not None:
            return self.each_layer.stage(num_layers), self.each_layer.stage_buffers(num_layers)
        factor = num_layers / self.layers[stage]
        return self.stages[stage].scaled(factor), max(1, round(factor * self.buffers_of(stage)))

    def buffers_of(self, stage: int) -> int:
        """The command buffers of a step on a stage."""
        return self.buffers[stage] if self.buffers else 1

    def accelerator(self, stage: int) -> Accelerator:
        """A stage's device."""
        return Accelerator(
            self.stages[stage], self.buffers_of(stage), self.device, self.draft, self.draft_buffers, self.draft_more
        )

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
            "buffers": list(self.buffers),
            "device": asdict(self.device),
            "draft_buffers": self.draft_buffers,
            "draft_more": self.draft_more,
            "each_layer": None if self.each_layer is None else self.each_layer.as_dict(),
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> "Machine":
        """The machine that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` is no description of a machine.
        """
        try:
            each_layer = numbers["each_layer"]
            return cls(
                tuple(StageCosts.from_dict(stage) for stage in numbers["stages"]),
                tuple(Hop(float(fixed), float(per_row)) for fixed, per_row in numbers["hops"]),
                tuple(int(count) for count in numbers["layers"]),
                float(numbers["host"]),
                float(numbers["draft"]),
                bool(numbers["launches_ahead"]),
                tuple(int(count) for count in numbers["buffers"]),
                DeviceTraits(**numbers["device"]),
                int(numbers["draft_buffers"]),
                None if each_layer is None else EachLayer.from_dict(each_layer),
                float(numbers["draft_more"]),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"this is no description of a machine ({type(error).__name__}: {error})") from error
