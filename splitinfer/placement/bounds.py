"""Bounds on every figure that is shown or advised: physics, the range of the trials, and the sizes that were timed.

    layers cut between machines    one chat is no faster than on the best single one of them; n machines do at most n
                                   times as much as that
    two machines as one stage      at most twice as fast, as each computes half of every layer
    longer prompts                 take no less time
    rows and positions             up to ``BEYOND`` times as many as were measured; layers of one kind cost the same
    trials                         agree, with room to compute (``Trials.tell``); otherwise the reason replaces the
                                   figure

A reason names the machine, the program that was busy there, and the cure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from splitinfer.common.plain_text import duration
from splitinfer.machine.profile import Load, MachineProfile, Profiles, Trials
from splitinfer.placement.asked import LONG_PROMPT, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import MOST_ALONE, MOST_EACH, Formulas

BEYOND = 4  # times as many rows or positions as were measured
_UNLIKE = 3  # times as long for the same layer: perhaps it is another machine, perhaps it was busy
_LEFT_OUT = 1.1  # times as long or as short as by the formulas, which leave some costs out even if trials agree
_ROUNDING = 1.001
_OLD = 60.0  # seconds; the age of an older measurement is shown


# -- trials ----------------------------------------------------------------------------------------


def busy_in_words(name: str, load: Load) -> list[str]:
    """Return a sentence if other programs may have slowed a machine down, else an empty list."""
    most = f", most of all {load.busiest}" if load.busiest else ""
    said = f"{name} was busy: other programs used {load.others:.1f} of its {load.processors} processors{most}."
    return [said] if load.is_high else []


def assumed(profiles: Profiles) -> Profiles:
    """Return the profiles from which to choose a cut: machines whose trials do not agree are as fast as the quickest of
    the others, or the quickest of all. Their trials stay, so that no figure of theirs is shown."""
    sure = [each for each in profiles.machines if each.trials.tell] or profiles.machines
    like = min(sure, key=_of_a_layer)

    def guessed(each: MachineProfile) -> MachineProfile:
        return replace(each, layers=like.layers, halves=like.halves, head=like.head, step=like.step)

    machines = tuple(each if each.trials.tell else guessed(each) for each in profiles.machines)
    return replace(profiles, machines=machines)


def doubts(profiles: Profiles) -> Iterator[str]:
    """Yield the doubts about the measurements, a sentence each; the last one says what to do."""
    machines = [each for each in profiles.machines if not each.across]
    found = [said for machine in machines for said in _doubts_of(machine)]
    yield from found
    if len(machines) > 1 and not all(each.trials.tell for each in machines):
        yield "Where a machine's speed is not known, the cut takes it to be as fast as the quickest."
    if found:
        yield "Close other programs there, and measure again: --measure."
        return
    measured = [each for each in machines if each.trials != Trials()]
    for quick, slow in combinations(sorted(measured, key=_of_a_layer), 2):
        if _of_a_layer(slow) > _UNLIKE * _of_a_layer(quick):
            times = _of_a_layer(slow) / max(1e-9, _of_a_layer(quick))
            yield f"{slow.name} took {times:.3g} times as long for a layer as {quick.name}; --measure measures again."


def _of_a_layer(machine: MachineProfile) -> float:
    return sum(costs.rows(1) for costs in machine.layers.values())


def _doubts_of(machine: MachineProfile) -> Iterator[str]:
    trials, name = machine.trials, machine.name
    if not trials.agree:
        most = max(trials.few, trials.many)
        yield (
            f"On {name} the same step took up to {most:.2g} times as long as before, so its speed is not known."
            if trials.few and trials.many
            else f"{name} was too slow to be measured twice, so its speed is not known."
        )
    yield from busy_in_words(name, trials.load)


def ages(profiles: Profiles) -> str:
    """Return a sentence with the ages of old measurements, or an empty text if all are new."""
    old = [(each.name, each.trials.age) for each in profiles.machines if not each.across and each.trials.age > _OLD]
    said = ", ".join(f"{name} {duration(age)} ago" for name, age in old)
    return f"Measured: {said}; --measure does it again." if old else ""


# -- figures ---------------------------------------------------------------------------------------


def spread_of(machines: Iterable[MachineProfile], *, reads: bool = False) -> float:
    """Return the factor by which a figure of these machines may be too large or too small; 1.0 for machines that were
    described and not measured. ``reads``: whether the figure depends on steps that read a prompt."""
    each = [trials.many if reads else trials.few for trials in (one.trials for one in machines) if trials != Trials()]
    return max([_LEFT_OUT, *each]) if each else 1.0


def unknown(formulas: Formulas, cut: Cut, asked: Asked) -> dict[str, str]:
    """Return why figures of a cut are not known, by their names in ``CutFigures``; an empty text for those that are.
    Drafts, if any are ``asked`` for, have the most rows that a block may have."""
    wrong, machines, at = impossible(formulas, cut), formulas.machines_of(cut), formulas.usual_position
    one, each = (1, 1) if asked.acceptance is None else (1 + MOST_ALONE, 1 + MOST_EACH)
    needed = {
        "one": (one, at, False),
        "turn": (formulas.chunk(cut, asked.prompt), at, True),
        "many": (each * -(-asked.streams // len(cut.layers)), at, False),
        "ttft": (formulas.chunk(cut, LONG_PROMPT), LONG_PROMPT, True),
    }
    return {name: wrong or why_not(machines, *steps, reads=reads) for name, (*steps, reads) in needed.items()}


def why_not(machines: Sequence[MachineProfile], rows: int, positions: int, *, reads: bool) -> str:
    """Return why a figure is unknown if it depends on steps of ``rows`` rows that each attend to ``positions``
    positions. Return an empty text if it is known."""
    for machine in machines:
        trials, measured = machine.trials, [costs.points for costs in machine.layers.values() if costs.points]
        if not trials.tell:
            return f"{machine.name} was busy" if trials.load.is_full else f"trials differ on {machine.name}"
        # A single number of rows says nothing of more rows.
        limits = (((BEYOND if points[1:] else 1) * points[-1][0], points[-1][0]) for points in measured)
        far, most = min(limits, default=(rows, rows))
        if trials != Trials() and rows > far:
            return f"measured up to {most:,} {'tokens a step' if reads else 'at once'}"
        if positions > BEYOND * trials.longest:
            return f"measured up to {trials.longest:,} tokens"
    return ""


def impossible(formulas: Formulas, cut: Cut) -> str:
    """Return what cannot be true of a cut's figures without drafts; nothing if they can be."""
    machines, count = formulas.machines_of(cut), formulas.num_machines(cut)
    at_once = count if any(each.across for each in machines) else 1
    if formulas.one(cut, None) > _ROUNDING * at_once * formulas.most_alone(cut, 1):
        return "faster than the best of its machines alone"
    if formulas.many(cut, None) > _ROUNDING * count * formulas.most_alone(cut, None):
        return f"more than {count} times its best machine alone"
    prompts = [formulas.prompt(cut, LONG_PROMPT // part) for part in (4, 2, 1)]
    if any(after * _ROUNDING < before for before, after in pairwise(prompts)):
        return "a longer prompt would take less time"
    return ""
