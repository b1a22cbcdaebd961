"""Finds a layout for the machines that are left when workers stay away, by the formulas of a plan."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from splitinfer.common.plain_text import listed, size
from splitinfer.core.absence import Rest
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.errors import CannotFit
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import MachineProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.document import lacking, layout_of
from splitinfer.placement.plan import plan

_SECONDS_PER_BYTE = 1e-11  # of weights, for machines whose speed is unknown: 100 GB/s


def without(
    profiles: Profiles,
    asked: Asked,
    written: Layout,
    gone: Collection[StageSpec],
    longest: int,
    *,
    is_known: bool = True,
) -> Rest:
    """Return the best layout of a chat without some workers.

    Args:
        profiles: the machines of ``written``, and perhaps more. A stage across two machines may be one of them.
        asked: its context is the one that the settings ask for.
        gone: the workers that are away, as ``written`` has them; a rank is a worker.
        longest: the most tokens that an open request can reach, for which there must be room at least.
        is_known: whether the machines' speeds are known.

    Raises:
        CannotFit: the machines that are left have too little memory; the text says how much is missing.
    """
    rest = replace(profiles, machines=tuple(left(profiles, written, gone)))
    shortest = min(asked.context, max(longest, BLOCK))
    for context in dict.fromkeys((asked.context, shortest)):
        for acceptance in dict.fromkeys((asked.acceptance, None)):
            wanted = replace(asked, context=context, acceptance=acceptance)
            found = plan(rest, wanted, [Aim.CHAT])
            if (best := found.best.get(Aim.CHAT)) is not None:
                layout = replace(layout_of(found, best, written), draft=written.draft)
                speed = best.figures.one if acceptance is None else best.figures.one_with_drafts
                has_drafts = acceptance is not None or asked.acceptance is None
                return Rest(layout, context, has_drafts, speed if is_known else None)
    missing = lacking(rest, replace(asked, context=shortest, acceptance=None), Aim.CHAT)
    others, away = ([one.name for one in each] for each in (rest.machines, gone))
    raise CannotFit(
        f"{listed(others)} cannot hold the model without {listed(away)}: {size(missing)} of memory are missing for the "
        f"weights and {shortest:,} tokens"
    )


def left(profiles: Profiles, written: Layout, gone: Collection[StageSpec]) -> Iterator[MachineProfile]:
    """Yield the machines that are left, the coordinator first. Of a stage across two machines that has lost one, the
    other is left; it takes twice as long for whole layers as both for their halves."""
    lost = {one.name for one in gone}
    addresses = {one.address for one in gone if not one.is_local}
    across = {stage.name: stage.ranks for stage in written.stages if stage.across}
    for i, machine in enumerate(profiles.machines):
        ranks = across.get(machine.name, ())
        there = [rank for rank in ranks if rank.name not in lost]
        if not ranks or len(there) == len(ranks):
            if i == 0 or not (machine.name in lost or machine.address in addresses):
                yield machine
            continue
        if i == 0 and not any(rank.is_local for rank in there):  # the coordinator, which had no layers
            yield replace(machine.slower(2.0), name="coordinator", address=None, key=None)
        for rank in there:
            address = None if i == 0 and rank.is_local else rank.address
            yield replace(machine.slower(2.0), name=rank.name, address=address, key=rank.key)


def alike(profiles: Profiles) -> Profiles:
    """Return machines of unknown speed as equally fast ones, so that memory decides."""
    model = profiles.model
    layers = {each.kind: _read(each.weights) for each in model.layers}
    machines = (replace(each, layers=layers, head=_read(model.head)) for each in profiles.machines)
    return replace(profiles, machines=tuple(machines))


def _read(weights: int) -> Costs:
    return Costs.line(weights * _SECONDS_PER_BYTE, weights * _SECONDS_PER_BYTE / 100)
