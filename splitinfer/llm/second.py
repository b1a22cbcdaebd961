"""What a second machine would bring to a model that runs on one: the memory it frees, and the plan's own figures.

The second machine is taken to be like the first, with half of the weights, over a link of 1 ms and 100 MB/s. Bytes
are known from the model; speeds need costs, measured before or taken from the pipeline's own steps.
"""

from dataclasses import replace

from splitinfer.machine.profile import MachineProfile, ModelProfile, Profiles
from splitinfer.models.memory import size
from splitinfer.placement.asked import LONG_PROMPT, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.plan import Figures, Planner

_SECOND = "(second)"  # its name, which no stage can have


def alone_in_words(model: ModelProfile, machine: MachineProfile | None, asked: Asked) -> str:
    """Where the layers are, and what a second machine would change. ``machine``: the costs of this one, if known."""
    here = f"All {model.num_layers} layers are on this machine."
    if model.num_layers < 2:
        return here
    if machine is None:
        return f"{here} {_memory(model)} After an answer, /plan predicts the speed."
    return f"{here} {_memory(model)} {_speed(*figures(Profiles(model, (machine,)), asked), asked.streams)}"


def figures(profiles: Profiles, asked: Asked) -> tuple[Figures, Figures]:
    """What the first machine does alone, and what it does with another one like it."""
    first, model = profiles.machines[0], profiles.model
    pair = replace(profiles, machines=(first, replace(first, name=_SECOND, address=f"tcp://{_SECOND}")), links=())
    cuts = [Cut((0,), (model.num_layers,)), halved(model)]
    planner = Planner(pair, replace(asked, acceptance=None), cuts)
    return planner.figures(cuts[0]), planner.figures(cuts[1])


def halved(model: ModelProfile) -> Cut:
    """The cut over two machines whose larger stage is smallest."""
    count = model.num_layers

    def larger(first: int) -> int:
        return max(model.weights(0, first), model.weights(first, count))

    first = min(range(1, count), key=larger)
    return Cut((0, 1), (first, count - first))


def _memory(model: ModelProfile) -> str:
    whole, rest = model.weights(0, model.num_layers), model.weights(0, halved(model).layers[0])
    return (
        f"A second machine would leave {size(rest)} of the {size(whole)} of weights here, which frees "
        f"{size(whole - rest)}."
    )


def _speed(now: Figures, then: Figures, streams: int) -> str:
    return (
        f"If it is like this one, it would read a prompt of {LONG_PROMPT:,} tokens in {then.ttft:.3g} s instead of "
        f"{now.ttft:.3g} s, and give {streams} requests at once {then.many:.3g} tokens per second instead of "
        f"{now.many:.3g}, and a single chat {then.one:.3g} instead of {now.one:.3g} (predicted, without drafts)."
    )
