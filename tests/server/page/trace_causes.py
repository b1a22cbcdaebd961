"""Why stages stood still, read from a trace file alone: another way to what the engine's own figures say.

    stage       a step is computed
    link        its frame is on its way; ``way_ms`` says since when, also where the frame before it was in the way
    gap         until the step before was made: waiting; until it was sent: a host; until it came: the link; then: a
                host

The first stage waits for results, which let the coordinator plan, or for requests. Of these a file says nothing, so
their times are given, and so are the spells in which a request was under way.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Frame(NamedTuple):
    """A frame on a link, or a request, which is made, sent and there at once. Seconds."""

    made: float
    sent: float
    received: float


@dataclass(frozen=True)
class Causes:
    """A stage's seconds: computing, and standing still by cause."""

    busy: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)

    @property
    def whole(self) -> float:
        return self.busy + sum(self.idle.values())

    @property
    def duty(self) -> float:
        return self.busy / self.whole if self.whole else 0.0

    def share(self, cause: str) -> float:
        return self.idle.get(cause, 0.0) / self.whole if self.whole else 0.0


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that may still grow."""
    text = path.read_text().rstrip().removesuffix("]").rstrip().rstrip(",")
    return [one for one in json.loads(text + "]") if one["ph"] == "X"]


def by_step(events: Iterable[dict[str, Any]], track: int) -> dict[int, dict[str, Any]]:
    """A track's events by step, in order."""
    return {one["args"]["step"]: one for one in events if one["tid"] == track + 1}


def begin(event: dict[str, Any]) -> float:
    return float(event["ts"]) / 1e6


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"]) / 1e6


def frames(made: dict[int, dict[str, Any]], link: dict[int, dict[str, Any]]) -> dict[int, Frame]:
    """The frames of a link, by step. ``made``: the steps on the stage before it."""
    return {
        step: Frame(end(made[step]), end(one) - one["args"]["way_ms"] / 1e3, end(one)) for step, one in link.items()
    }


def causes(
    events: Sequence[dict[str, Any]],
    num_stages: int,
    spells: Sequence[tuple[float, float]],
    requests: Sequence[float],
    numbers: Collection[int],
) -> list[Causes]:
    """Each stage's seconds in the steps of these ``numbers``, with the gaps before them. ``requests``: when each was
    heard of. At least two stages."""
    stages = [by_step(events, 2 * i) for i in range(num_stages)]
    links = [frames(stages[i], by_step(events, 2 * i + 1)) for i in range(num_stages)]
    triggers = sorted([*links[-1].values(), *(Frame(at, at, at) for at in requests)], key=lambda one: one.received)
    found = []
    for i, steps in enumerate(stages):
        waits = "upstream" if i else "downstream"
        idle, busy = defaultdict[str, float](float), 0.0
        spans = sorted((begin(one), end(one), step) for step, one in steps.items())
        spans = [(spells[0][0], spells[0][0], -1), *spans] if spells else spans
        for (_, before, _), (start, done, step) in pairwise(spans):
            if step not in numbers:
                continue
            frame = links[i - 1][step] if i else _last(triggers, start)
            for cause, seconds in _gap(before, start, frame, waits, spells).items():
                idle[cause] += seconds
            busy += done - max(start, before)
        found.append(Causes(busy, dict(idle)))
    return found


def _last(triggers: Sequence[Frame], start: float) -> Frame:
    """What let the first stage begin at ``start``: the last that had come."""
    return next((one for one in reversed(triggers) if one.received <= start + 1e-9), Frame(0.0, 0.0, 0.0))


def _gap(
    before: float, start: float, frame: Frame, waits: str, spells: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """A gap's seconds by cause; where all requests ended in it, nothing was to be done before the next one."""
    found = defaultdict[str, float](float)
    under_way = [(max(a, before), min(b, start)) for a, b in spells if max(a, before) < min(b, start)]
    for a, b in under_way:
        if b < start:
            found["nothing_to_do"] += b - a
            continue
        at = a
        for mark, cause in ((frame.made, waits), (frame.sent, "host"), (frame.received, "link"), (start, "host")):
            to = min(max(mark, at), start)
            found[cause] += to - at
            at = to
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}
