"""What happens while workers stay away: a layout for the others, and when the workers take part again. Times are
arguments; nothing here reads a clock.

    lost          the pipeline waits for the worker, for ``leave_after`` seconds
    left out      the others hold its layers (``Rest``), and the worker is sought
    back          the written layout is loaded again as soon as no request is open, or as that pays (``pays``)

A worker that was lost three times in ten minutes *flaps*: it is left out at once, and until no request is open.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from splitinfer.common.plain_text import listed, rate
from splitinfer.core.layout import Layout

_FLAPS, _WITHIN = 3, 600.0  # losses, seconds


@dataclass(frozen=True, slots=True)
class Rest:
    """A layout to load, as written or without workers that are away.

    room: the tokens of a sequence for which each stage must have room; None: as the settings say.
    drafts: whether the drafter on the last stage, if there is one, is loaded.
    speed: about how many tokens a second one answer gets, if that is known.
    """

    layout: Layout
    room: int | None = None
    drafts: bool = True
    speed: float | None = None


@dataclass(slots=True)
class LossTimes:
    """When each worker was lost, in seconds, by its name."""

    _times: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, now: float) -> None:
        """Count the loss of a worker."""
        self._times[name] = [*self._times.get(name, []), now][-_FLAPS:]

    def flaps(self, names: Collection[str], now: float) -> bool:
        """Return whether one of these workers was lost three times in the last ten minutes."""
        each = (self._times.get(name, []) for name in names)
        return any(len(times) == _FLAPS and now - times[0] <= _WITHIN for times in each)


def pays(now: float | None, then: float | None, tokens: int, pause: float | None) -> bool:
    """Return whether another layout brings open answers to their ends sooner.

    Args:
        now, then: seconds of a token with the layout in force, and with the other one; None: unknown.
        tokens: tokens that the longest answer still gets, as far as that can be guessed.
        pause: seconds until the other layout computes new tokens; None: unknown.
    """
    if now is None or then is None or pause is None:
        return False
    return pause + tokens * then < tokens * now


def tokens_to_come(num_generated: int, most: int) -> int:
    """Return a guess of the tokens that an answer still gets: as many as it has, and at most ``most`` in all."""
    return min(most - num_generated, num_generated)


def told(gone: Sequence[str], rest: Rest, *, flaps: bool = False) -> str:
    """Return the sentences about workers that are left out, and the layout without them.

    >>> from splitinfer.core.layout import lay_out
    >>> told(["mini"], Rest(Layout(lay_out([("studio", 66, None)])), speed=8.2))
    'mini is gone. studio goes on alone with 66 of 66 layers, at about 8.2 tokens/s; mini takes part again when it is \
back.'
    """
    stages, whole = rest.layout.stages, rest.layout.num_layers
    names, numbers = listed([stage.name for stage in stages]), listed([str(stage.num_layers) for stage in stages])
    go = "goes on alone" if len(stages) == 1 else "go on"
    speed = "" if rest.speed is None else f", at about {rate(rest.speed)} tokens/s"
    drafts = "" if rest.drafts else ", without its drafter"
    away = f"{listed(gone)} {'is' if len(gone) == 1 else 'are'} gone"
    until = f"{part_again(gone)} when {'it is' if len(gone) == 1 else 'they are'} back"
    if flaps:
        away, until = f"{away}, for the third time in ten minutes", f"{part_again(gone)} when no request is open"
    return f"{away}. {names} {go} with {numbers} of {whole} layers{drafts}{speed}; {until}."


def part_again(names: Sequence[str]) -> str:
    """Return, as part of a sentence, that workers take part again."""
    return f"{listed(names)} {'takes' if len(names) == 1 else 'take'} part again"
