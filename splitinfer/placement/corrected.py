"""Profiles of machines as they were measured, corrected by what the steps of a running pipeline have cost.

A stage's steps tell how many times as long its machine takes as it was measured to take, whatever the reason: heat,
other programs, a profile of another day. All of the machine's costs are multiplied by that. Machines without layers
have no steps, and links none of their own: they stay as they were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.cost_model import CostModel
from splitinfer.machine.profile import MachineProfile, Profiles
from splitinfer.placement.pipeline import costs_of

_NOTABLE = 1.2  # times as long, or as short


@dataclass(frozen=True, slots=True)
class Corrected:
    """``times``: how many times as long each machine with layers takes as it was measured to take, by its name."""

    profiles: Profiles
    times: Mapping[str, float]


def corrected(measured: Profiles, layout: Layout, costs: CostModel, free: Mapping[str, int]) -> Corrected:
    """Correct profiles by a running pipeline. ``layout``: its cut over some of the machines; ``costs``: those of its
    stages; ``free``: bytes that a stage may take on a machine when nothing is loaded there, where that is known better.

    Raises:
        KeyError: a stage of the layout is none of the machines.
    """
    known, times = {machine.name: machine for machine in measured.machines}, dict[str, float]()
    for spec, own in zip(layout.stages, costs.stages, strict=True):
        expected = costs_of(measured.model, known[spec.name], spec.start, spec.end)
        times[spec.name] = own.relative_to(expected) or 1.0
    machines = tuple(_corrected(machine, times.get(machine.name, 1.0), free) for machine in measured.machines)
    return Corrected(replace(measured, machines=machines), times)


def _corrected(machine: MachineProfile, times: float, free: Mapping[str, int]) -> MachineProfile:
    slower = machine.slower(times)
    # Drafts and the coordinator's own time between steps are no part of a stage's steps.
    return replace(
        slower,
        free_bytes=free.get(machine.name, machine.free_bytes),
        **{name: getattr(machine, name) for name in ("host", "draft", "draft_more")},
    )


def times_in_words(times: Mapping[str, float]) -> list[str]:
    """The machines that take notably longer, or shorter, than they were measured to take, in sentences."""
    return [
        f"{name} takes {each:.2g} times as long as it was measured to take."
        for name, each in times.items()
        if not 1 / _NOTABLE < each < _NOTABLE
    ]
