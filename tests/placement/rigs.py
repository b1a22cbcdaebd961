"""Profiled machines to plan for: a model of 12 layers, and machines so many times as slow as each other."""

from collections.abc import Sequence
from dataclasses import replace

from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import DraftProfile, LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles

GB = 10**9
LAYER = Costs.through({1: 0.6e-3, 8: 0.68e-3, 16: 1e-3, 32: 1.8e-3, 128: 7e-3, 512: 27.5e-3}, 2e-9, 3e-10)
MODEL = ModelProfile(
    "some/model",
    (LayerProfile("layer", GB // 2, 4096),) * 12,
    embedding=GB // 4,
    head=GB // 4,
    hidden_row=8192,
    context_length=131072,
    draft=DraftProfile("some/draft", GB // 8, 1024),
)
FIRST = MachineProfile(
    "m0", {"layer": LAYER}, step=0.5e-3, head=Costs.line(0.4e-3, 0.02e-3), draft=1e-3, draft_more=0.02e-3,
    launches_ahead=True, free_bytes=64 * GB,
)  # fmt: skip


def rig(ratio: Sequence[float], hop: float = 0.0003, free: Sequence[int] | None = None) -> Profiles:
    """Machines ``m0``, ``m1``, ... of these slownesses, with hops of ``hop`` seconds and these bytes free."""
    machines = tuple(
        replace(
            FIRST.slower(times),
            name=f"m{i}",
            address=None if i == 0 else f"tcp://m{i}.local:5577",
            free_bytes=FIRST.free_bytes if free is None else free[i],
        )
        for i, times in enumerate(ratio)
    )
    names = [machine.name for machine in machines]
    links = tuple(LinkProfile(a, b, hop, 1e9) for a in names for b in names if a < b)
    return Profiles(MODEL, machines, links)
