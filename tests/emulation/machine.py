"""A machine: the seconds of stages, links, drafts and the coordinator's own work, and what the devices are like.

Machines are described in files (``files``). One can be simulated (``tests.sim``), and emulated: a device with its times
computes real models (``device``).
"""

from dataclasses import replace

from pydantic.dataclasses import dataclass

from splitinfer.machine.costs import Costs, Count, NotNegative, Numbers
from tests.emulation.device_queue import DeviceTraits, Positive

SUMS = 2  # of a layer: of its attention, and of what follows


@dataclass(frozen=True, slots=True)
class Hop:
    """The way from a stage to the next, or from the last one back: seconds for each step, and for each of its rows."""

    fixed: NotNegative = 0.0
    per_row: NotNegative = 0.0


@dataclass(frozen=True, slots=True)
class EachLayer:
    """The costs of a stage by the number of its layers, so that any cut can be tried.

    layer: the costs of a step on one layer.
    step: seconds of a step on any stage, whatever layers it has.
    buffers: command buffers of a step, for each layer.

    Raises:
        ValueError: a number is out of its range.
    """

    layer: Costs
    step: NotNegative = 0.0
    buffers: Positive = 1.0

    def stage(self, num_layers: float) -> Costs:
        return self.layer.scaled(num_layers).plus(Costs(((1, self.step),)))

    def stage_buffers(self, num_layers: int) -> int:
        return max(1, round(self.buffers * num_layers))


@dataclass(frozen=True, slots=True)
class Machine(Numbers):
    """A pipeline.

    stages: the costs of steps on each stage.
    hops: the hop after each stage.
    layers: the number of layers of each stage.
    host: seconds of the coordinator for each step, beside computing.
    draft: seconds for each draft, on the device that makes them.
    launches_ahead: whether the devices compute while their hosts go on, as GPUs do.
    buffers: the command buffers of a step on each stage; empty: one.
    device: what the devices are like.
    draft_buffers: the command buffers of a draft.
    each_layer: the costs of stages of any number of layers; ``None``: they are proportional to the layers.
    draft_more: seconds for each further sequence in a round of drafts, which are made together.
    drafts_at_end: whether the last stage's device makes the drafts, not the first's.
    drafts_at_once: the most drafts of a round; 0: one.
    sum: the costs of a sum of ranks that have a stage together, by rows; each of its layers makes ``SUMS``.

    Raises:
        ValueError: the parts contradict each other, or a number is out of its range.
    """

    stages: tuple[Costs, ...]
    hops: tuple[Hop, ...]
    layers: tuple[Count, ...]
    host: NotNegative = 0.0
    draft: NotNegative = 0.0
    launches_ahead: bool = False
    buffers: tuple[Count, ...] = ()
    device: DeviceTraits = DeviceTraits()
    draft_buffers: Count = 1
    each_layer: EachLayer | None = None
    draft_more: NotNegative = 0.0
    drafts_at_end: bool = False
    drafts_at_once: int = 0
    sum: Costs = Costs()

    def __post_init__(self) -> None:
        if not self.stages or not len(self.stages) == len(self.hops) == len(self.layers):
            raise ValueError(
                f"{len(self.stages)} stages have {len(self.hops)} hops and {len(self.layers)} layer counts"
            )
        if self.buffers and len(self.buffers) != len(self.stages):
            raise ValueError(f"{len(self.stages)} stages have the numbers of command buffers {list(self.buffers)}")

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def wait(self) -> float:
        """Seconds from the end of a step until it goes on its way."""
        return self.device.wait if self.launches_ahead else 0.0

    def draft_round(self, sequences: int) -> float:
        return self.draft + self.draft_more * (sequences - 1)

    def buffers_of(self, stage: int) -> int:
        return self.buffers[stage] if self.buffers else 1

    def alone(self, stage: int, num_layers: int) -> "Machine":
        """A stage as a machine of its own, had it so many layers. Its costs are those of each layer where these are
        known, and else proportional to the layers."""
        if self.each_layer is not None:
            costs, buffers = self.each_layer.stage(num_layers), self.each_layer.stage_buffers(num_layers)
        else:
            factor = num_layers / self.layers[stage]
            costs, buffers = self.stages[stage].scaled(factor), max(1, round(factor * self.buffers_of(stage)))
        return replace(self, stages=(costs,), hops=self.hops[:1], layers=(num_layers,), buffers=(buffers,))

    def of_rank(self, num_ranks: int, *, sums: bool) -> "Machine":
        """One of so many ranks that have the only stage together: its part of each layer, and the ``sums``."""
        count, each = self.layers[0], self.each_layer
        part = self.stages[0].scaled(1 / num_ranks) if each is None else each.stage(count / num_ranks)
        return replace(self, stages=(part.plus(self.sum.scaled(SUMS * count)) if sums else part,))
