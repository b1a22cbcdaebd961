"""What would make a model fit where it does not: fewer bits, one more machine, less context, fewer streams.

Whether anything fits is found without trying all cuts: in each order every machine takes as many layers as it has room
for, and the last one the rest. (Taking fewer never leaves more room for the others, because room only falls with
layers.) Stages that share a machine are given equal parts of it here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from splitinfer.core.layout import LOCAL
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import orders
from splitinfer.placement.memory import Memory

_BLOCK = 256  # tokens; lengths are found in steps of these
_FEWEST = 0.05  # of the weights: nobody has fewer bits
_EXACT = 0.005  # relative, of weights and bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why nothing fits that meets an aim, and what would. Each remedy alone would do; ``None``: it would not.

    lacking: bytes that are missing in all.
    first: bytes that the coordinator lacks for a single layer; then no further machine helps.
    weights: the share of the weights' bytes that would fit.
    machine: bytes that one more machine would have to have free.
    context: tokens of each sequence that would fit.
    streams: sequences that would fit.
    """

    aim: Aim
    context_asked: int
    sequences: int
    lacking: int
    first: int
    weights: float | None
    machine: int | None
    context: int | None
    streams: int | None


def shortage(profiles: Profiles, asked: Asked, aim: Aim) -> Shortage:
    """Why nothing fits, and what would."""
    context = _BLOCK if aim is Aim.CONTEXT else asked.context
    sequences = asked.sequences(aim)

    def fits(what: Profiles, tokens: int = context, count: int = sequences) -> bool:
        return lacking(what, asked, tokens, count) <= 0

    most_blocks = -(-context // _BLOCK)
    blocks = _most(lambda n: fits(profiles, n * _BLOCK), most_blocks)
    return Shortage(
        aim=aim,
        context_asked=context,
        sequences=sequences,
        lacking=lacking(profiles, asked, context, sequences),
        first=max(0, Memory(_apart(profiles), asked).lack(0, 0, 1, context, sequences)),
        weights=_most_share(lambda share: fits(_lighter(profiles, share))),
        machine=_least_bytes(lambda free: fits(_with_another(profiles, free)), profiles),
        context=blocks * _BLOCK or None,
        streams=_most(lambda n: fits(profiles, context, n), sequences) or None,
    )


def lacking(profiles: Profiles, asked: Asked, context: int, sequences: int) -> int:
    """The bytes that are missing where the layers are spread best; 0 or fewer: it fits."""
    memory = Memory(_apart(profiles), asked)
    every = orders(len(profiles.machines), profiles.model.num_layers, uses_all=asked.uses_all)
    return min(_left_over(memory, order, profiles.model.num_layers, context, sequences) for order in every)


def _left_over(memory: Memory, order: tuple[int, ...], num_layers: int, context: int, sequences: int) -> int:
    """What the last machine of an order lacks when those before it are full, and what any of them lacks for a layer."""
    start, missing = 0, 0
    for place, machine in enumerate(order[:-1]):
        most = num_layers - (len(order) - 1 - place)  # each of the others gets one
        end = start + 1
        missing += max(0, memory.lack(machine, start, end, context, sequences))
        while end < most and memory.lack(machine, start, end + 1, context, sequences) <= 0:
            end += 1
        start = end
    last = memory.lack(order[-1], start, num_layers, context, sequences)
    return missing + max(0, last) if missing else last


def _apart(profiles: Profiles) -> Profiles:
    """The same with stages of one machine as machines of their own, with equal parts of its memory."""
    here = [i for i, machine in enumerate(profiles.machines) if i == 0 or machine.address == LOCAL]
    free = profiles.machines[0].free_bytes // len(here)
    machines = [
        replace(machine, free_bytes=free, address=None) if i in here else machine
        for i, machine in enumerate(profiles.machines)
    ]
    return replace(profiles, machines=tuple(machines))


def _lighter(profiles: Profiles, share: float) -> Profiles:
    model = profiles.model
    layers = tuple(replace(layer, weights=int(share * layer.weights)) for layer in model.layers)
    embedding, head = int(share * model.embedding), int(share * model.head)
    return replace(profiles, model=replace(model, layers=layers, embedding=embedding, head=head))


def _with_another(profiles: Profiles, free: int) -> Profiles:
    other = replace(profiles.machines[-1], name="another machine", address="tcp://another:1", free_bytes=free)
    return replace(profiles, machines=(*profiles.machines, other))


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 below ``most`` that fits; 0 always does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _most_share(fits: Callable[[float], bool]) -> float | None:
    low, high = _FEWEST, 1.0
    if not fits(low):
        return None
    while high - low > _EXACT:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _least_bytes(fits: Callable[[int], bool], profiles: Profiles) -> int | None:
    model = profiles.model
    high = 2 * model.weights(0, model.num_layers) + 2**30
    while not fits(high):
        high *= 2
        if high > 2**50:
            return None
    low = 0
    while high - low > _EXACT * high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
