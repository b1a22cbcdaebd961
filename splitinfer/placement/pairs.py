"""Plans two machines as one stage (tensor parallel): each computes half of every layer, and waits for the other's sums.

To a plan, such a pair is one more machine:

    t(r)  of a layer    the slower machine's t(r) for a rank's part, + sums x s(r)
    s(r)  of a sum      as measured between both; before that 2 l + r b: over a ring of two there and back, with l the
                        latency one way and b the seconds of a row's bytes
    bytes               of the half on both: a rank's part of the layers; embedding, norms and router whole

The model decides which parts divide (``models.cut.divided``). If no part of a layer was measured, its time follows its
bytes of weights or of keys and values; that flatters small layers and experts, whose time is not all reading.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from splitinfer.common.endpoint import Endpoint, is_loopback
from splitinfer.core.layout import LOCAL
from splitinfer.core.link_transport import RING
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import link_of


def with_pairs(profiles: Profiles) -> Profiles:
    """Return the profiles with each pair that may be one stage added after the machines."""
    half = profiles.model.half
    if half is None or any(machine.across for machine in profiles.machines):
        return profiles
    apart = [(a, b) for a, b in combinations(profiles.machines, 2) if _host(a) != _host(b)]
    ordered = [(b, a) if _host(b) is None else (a, b) for a, b in apart]  # the rank on this machine is the first
    found = [_pair(profiles, half, a, b) for a, b in ordered]
    return replace(profiles, machines=(*profiles.machines, *found))


def _host(machine: MachineProfile) -> str | None:
    """Return a machine's host, whose workers share its device, or None for this host."""
    address = machine.address or LOCAL
    if address == LOCAL or address.startswith("inproc://"):
        return None
    host = Endpoint.parse(address).host
    return None if is_loopback(host) else host


def exposed(profiles: Profiles, cut: Cut) -> str | None:
    """Return a machine of a pair whose sums would cross a network unencrypted, or None if no pair has one."""
    pairs = [profiles.machines[place].across for place in cut.machines if profiles.machines[place].across]
    names = {name for pair in pairs if sums_over(profiles, *pair) == RING for name in pair}
    return next((each.name for each in profiles.machines if each.name in names and each.is_exposed), None)


def pairs_of(profiles: Profiles) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of machines, and the places of both machines of each pair."""
    names = [machine.name for machine in profiles.machines if not machine.across]
    return len(names), [
        (names.index(machine.across[0]), names.index(machine.across[1])) for machine in profiles.machines[len(names) :]
    ]


def _pair(profiles: Profiles, half: ModelProfile, a: MachineProfile, b: MachineProfile) -> MachineProfile:
    layers, model, one_sum = dict[str, Costs](), profiles.model, sum_of(profiles, a.name, b.name)
    for whole, part in zip(model.layers, half.layers, strict=True):
        if whole.kind not in layers:
            own = _half_of(a, whole, part).slowest(_half_of(b, whole, part))
            layers[whole.kind] = own.plus(one_sum.scaled(part.sums))
    return replace(
        a,
        name="+".join((a.name, b.name)),
        layers=layers,
        halves={},
        key=None,
        step=max(a.step, b.step),
        host=a.host + b.host,  # the first passes a step on before it launches it
        head=a.head.slowest(b.head).scaled(_share(half.head, model.head)),
        free_bytes=min(a.free_bytes, b.free_bytes),
        scores=max(a.scores, b.scores),
        launches_ahead=a.launches_ahead and b.launches_ahead,
        across=(a.name, b.name),
        trials=a.trials.and_those(b.trials),
    )


def _half_of(machine: MachineProfile, whole: LayerProfile, part: LayerProfile) -> Costs:
    """Return the costs of a rank's part of a layer: as measured, but at least its share and at most the layer's."""
    costs, attends = machine.layers[whole.kind], _share(_kv(part), _kv(whole))
    own = costs.scaled(_share(part.weights, whole.weights))
    least = replace(own, decode=costs.decode * attends, chunk=costs.chunk * attends)
    return machine.halves.get(whole.kind, least).slowest(least).quickest(costs)


def _kv(layer: LayerProfile) -> int:
    return layer.kv_per_token + layer.kv_fixed


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def sums_over(profiles: Profiles, a: str, b: str) -> str:
    """Return the backend that adds up two machines' halves: RDMA if sums over it were measured, else a ring."""
    link = profiles.link(a, b)
    return RING if link is None else link.sums_over


def sum_of(profiles: Profiles, a: str, b: str) -> Costs:
    """Return the seconds of a sum of two machines' hidden states, by their rows."""
    link = profiles.link(a, b)
    if link is not None and link.sums is not None:
        return link.sums
    latency, bandwidth = link_of(profiles, a, b)
    row = profiles.model.hidden_row if profiles.model.half is None else profiles.model.half.hidden_row
    return Costs.line(2 * latency, row / bandwidth)


def with_sums(profiles: Profiles, across: Sequence[str], sums: Costs) -> Profiles:
    """Return the profiles with the measured costs of two machines' sums. ``profiles``: without pairs."""
    a, b = across
    latency, bandwidth = link_of(profiles, a, b)
    others = [link for link in profiles.links if {link.source, link.target} != {a, b}]
    link = LinkProfile(a, b, latency, bandwidth, sums, sums_over(profiles, a, b))
    return replace(profiles, links=(*others, link))


def sums_of_token(profiles: Profiles, pair: MachineProfile) -> tuple[int, float]:
    """Return the number of sums for a token with all layers on a pair, and the seconds of all of them."""
    half = profiles.model.half
    assert half is not None
    count = sum(layer.sums for layer in half.layers)
    return count, count * sum_of(profiles, *pair.across).rows(1)
