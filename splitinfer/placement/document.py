"""Writes a plan as sentences, as a layout file, and as plain numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import yaml

from splitinfer.common.plain_text import seconds, size
from splitinfer.core.codecs import NONE
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import LOCAL, Layout, StageSpec, lay_out, shares_port, written
from splitinfer.core.link_transport import OVER_TCP, RING
from splitinfer.machine.profile import MachineProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.bounds import doubts, unknown
from splitinfer.placement.cuts import Cut, on_grid, stride_of
from splitinfer.placement.formulas import Formulas, hop_ends
from splitinfer.placement.memory import Memory
from splitinfer.placement.pairs import exposed, sums_of_token, sums_over, with_pairs
from splitinfer.placement.plan import CLEARLY, Best, Plan, Ways, orders_of

_WIDE = 10**6  # characters of a line of YAML: no line is broken


# -- sentences -----------------------------------------------------------------------------------


def name_in_words(profiles: Profiles, cut: Cut) -> str:
    """Return a cut with its machines: ``studio 40, mini 26``."""
    names = (profiles.machines[m].name for m in cut.machines)
    return ", ".join(f"{name} {count}" for name, count in zip(names, cut.layers, strict=True))


def why(plan: Plan, best: Best) -> Iterator[str]:
    """Yield a few sentences: the seconds of each stage, the machines without layers, the limits of memory."""
    if all(machine.trials.tell for machine in plan.profiles.machines):
        yield from _by_speed(plan, best)
    machines, cut = plan.profiles.machines, best.cut
    within = [machines[m].across for m in cut.machines if machines[m].across]
    for a, b in [(machines[a].ranks[-1], machines[b].ranks[0]) for a, b in hop_ends(cut)] + within:
        if a != b and plan.profiles.link(a, b) is None:
            yield f"The link from {a} to {b} counts as the slowest that was measured."
    yield from compared(plan, best)


def _by_speed(plan: Plan, best: Best) -> Iterator[str]:
    machines, cut = plan.profiles.machines, best.cut
    found = Formulas(plan.profiles, plan.asked).seconds(cut, plan.asked.sequences(best.aim))
    times = (f"{seconds(each)} on {machines[m].name}" for each, m in zip(found, cut.machines, strict=True))
    what = "Each step of one group of chats" if best.aim is Aim.THROUGHPUT else "Each token"
    yield f"{what}: {', '.join(times)}."
    used = {name for m in cut.machines for name in machines[m].ranks}
    for machine in machines:
        if not machine.across and machine.name not in used:
            yield f"{machine.name} gets no layers: the cut would be no better for it."
    if best.faster is not None:
        lacks = Memory(plan.profiles, plan.asked).lacks(best.faster, plan.asked.context, plan.asked.sequences(best.aim))
        lack, place = max((lack, place) for place, lack in lacks.items())
        faster, lacking = name_in_words(plan.profiles, best.faster), f"{size(lack)} of memory"
        yield f"{faster} would be {best.gain - 1:.0%} faster, but {machines[place].name} lacks {lacking}."


def compared(plan: Plan, best: Best) -> Iterator[str]:
    """Say whether two machines as one stage are faster than the layers cut between them, with the figures of both.
    Say nothing if a machine's speed is not known."""
    ways, machines = plan.ways.get(best.aim, Ways()), plan.profiles.machines
    shared, cut = ways.tensor_parallel, ways.pipeline or ways.alone
    if shared is not None and cut is not None and all(machine.trials.tell for machine in machines):
        pair = next(machines[m] for m in shared.cut.machines if machines[m].across)
        count, sums = sums_of_token(plan.profiles, pair)
        pays = (1 / cut.figures.one / CLEARLY - 1 / shared.figures.one + sums) / count  # without drafts
        far, is_best = exposed(plan.profiles, shared.cut), best.cut == shared.cut
        verdict = "is faster" if is_best else "was not chosen" if far else "would not be clearly faster"
        more = f" They are not encrypted, and {far} is not at a cable; --insecure-sums allows it." if far else ""
        if pays > 0 and verdict.startswith("would"):
            more = f" Each takes {1e6 * sums / count:,.0f} µs; for one stream they would pay at {1e6 * pays:,.0f} µs."
        other = "one machine" if len(cut.cut.machines) == 1 else "a pipeline"
        yield (
            f"Tensor parallel {verdict}: {_rates(shared)} tokens a second; {other} {_rates(cut)}; "
            f"over this link sums cost {1000 * sums:.3g} ms a token.{more}"
        )


def _rates(best: Best) -> str:
    """Return the tokens per second of a cut, without and with drafts."""
    figures = best.figures
    plain, drafted = figures.one, figures.one_with_drafts
    if best.aim is Aim.THROUGHPUT:
        plain, drafted = figures.many, figures.many_with_drafts
    return f"{plain:.3g}" if drafted is None else f"{plain:.3g}, with drafts {drafted:.3g}"


def lacking(profiles: Profiles, asked: Asked, aim: Aim) -> int:
    """Return the least bytes of memory that any cut lacks for an aim, on all of its machines together."""
    context, sequences = BLOCK if aim is Aim.CONTEXT else asked.context, asked.sequences(aim)
    memory = Memory(profiles, asked)
    needs = (memory.lacks(cut, context, sequences).values() for cut in _some_cuts(profiles, asked))
    return min(sum(max(0, lack) for lack in each) for each in needs)


def _some_cuts(profiles: Profiles, asked: Asked) -> list[Cut]:
    num_layers, every = profiles.model.num_layers, orders_of(profiles, asked)
    return list(on_grid(every, num_layers, stride_of(every, num_layers)))


def shortage(profiles: Profiles, asked: Asked, aim: Aim) -> str:
    """Return a sentence for an aim that no cut meets: the lacking memory, and the ways to make room."""
    context, sequences = BLOCK if aim is Aim.CONTEXT else asked.context, asked.sequences(aim)
    profiles = with_pairs(profiles)
    memory = Memory(profiles, asked)
    what = "a sequence" if sequences == 1 else f"{sequences} streams"
    longest = max(memory.longest(cut) for cut in _some_cuts(profiles, asked))
    shorter = f"a context of {longest:,} tokens for one sequence, " if longest else ""
    missing = size(lacking(profiles, asked, aim))
    share = f"(KV may take {asked.kv_share:.0%} of what the weights leave free.)"
    return (
        f"For {aim}, {what} of {context:,} tokens would need {missing} more memory. Ways to make room: "
        f"{shorter}fewer bits a weight, one more machine. {share}"
    )


# -- a layout file -------------------------------------------------------------------------------


def layout_of(plan: Plan, best: Best, base: Layout | None = None) -> Layout:
    """Return the layout of a cut. ``base``: supplies the values that a plan does not choose, such as codecs, transports
    and serving options."""
    known = {} if base is None else {stage.name: stage for stage in base.stages}
    machines = plan.profiles.machines
    stages = lay_out((machines[m].name, end - start, None) for m, start, end in best.cut.stages())
    specs = tuple(
        _across(plan.profiles, spec, machines[m].across, known.get(spec.name))
        if machines[m].across
        else _stage(spec, machines[m], known.get(spec.name), is_first=i == 0)
        for i, (spec, m) in enumerate(zip(stages, best.cut.machines, strict=True))
    )
    specs = (
        *specs[:1],
        *(replace(b, link_transport=OVER_TCP) if shares_port(a, b) else b for a, b in pairwise(specs)),
    )
    model, draft = plan.profiles.model, plan.profiles.model.draft
    drafter = None if draft is None or plan.asked.acceptance is None else draft.name
    if base is None:
        return Layout(specs, model.name, drafter)
    return replace(base, stages=specs, model=model.name, draft=drafter)


def _stage(spec: StageSpec, machine: MachineProfile, known: StageSpec | None, *, is_first: bool) -> StageSpec:
    if known is not None and known.across:  # measured as one machine
        return replace(known, start=spec.start, end=spec.end)
    if is_first:
        return spec
    spec = replace(spec, address=machine.address, key=machine.key)
    if known is None:
        return spec
    return replace(spec, codec=known.codec, link_transport=known.link_transport, experts_gb=known.experts_gb)


def _across(profiles: Profiles, spec: StageSpec, names: Sequence[str], known: StageSpec | None) -> StageSpec:
    """Return a stage across two machines. The coordinator starts the worker for its own part itself."""
    machines = {each.name: each for each in profiles.machines}
    ranks = tuple(written(machines[name].address or LOCAL, machines[name].key) for name in names)
    spec = replace(spec, across=ranks, sums=sums_over(profiles, *names))
    if known is None:
        return spec
    return replace(spec, codec=known.codec, sums=known.sums, sums_device=known.sums_device)


def text_of(layout: Layout, comments: Iterable[str]) -> str:
    """Return the text of a layout's file. ``comments``: lines before it."""
    lines = [f"# {line}" for line in comments]
    lines += [_flow({key: value}, braces=False) for key, value in _top(layout).items()]
    lines.append("stages:")
    lines += [f"  - {_flow(_of_stage(stage))}" for stage in layout.stages]
    return "\n".join(lines) + "\n"


def _top(layout: Layout) -> dict[str, Any]:
    """Return the keys of a layout, without its stages and without defaults."""
    plain = Layout(layout.stages)
    found: dict[str, Any] = {
        name: getattr(layout, name)
        for name in ("model", "draft", "dtype", "kv_format", "float32_head")
        if getattr(layout, name) != getattr(plain, name)
    }
    serving = layout.serving.as_dict()
    return {**found, "serving": serving} if serving else found


def _of_stage(stage: StageSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": stage.name, "layers": stage.num_layers}
    found |= {name: value for name in ("address", "key") if (value := getattr(stage, name)) is not None}
    if stage.across:
        found["across"] = list(stage.across)
        found |= {"sums": stage.sums} if stage.sums != RING else {}
        found |= {"sums_device": stage.sums_device} if stage.sums_device is not None else {}
    found |= {} if stage.experts_gb is None else {"experts_gb": stage.experts_gb}
    if stage.codec != NONE:
        found["codec"] = stage.codec
    if stage.link_transport != OVER_TCP:
        link = asdict(stage.link_transport)
        found |= {name: value for name, value in link.items() if value is not None}
    return found


def _flow(mapping: dict[str, Any], *, braces: bool = True) -> str:
    """Return a mapping in one line of YAML."""
    text = yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=_WIDE, allow_unicode=True).strip()
    return text if braces else text[1:-1]


# -- plain numbers -------------------------------------------------------------------------------


def as_dict(plan: Plan, shortages: Mapping[Aim, str]) -> dict[str, Any]:
    """Return a plan as plain numbers. ``shortages``: the shortage, in words, of each aim that no cut meets."""
    return {
        "model": plan.profiles.model.name,
        "machines": [machine.name for machine in plan.profiles.machines if not machine.across],
        "asked": asdict(plan.asked),
        "doubts": list(doubts(plan.profiles)),
        "tried": plan.tried,
        "best": {str(aim): _best_as_dict(plan, best) for aim, best in plan.best.items()},
        "shortages": {str(aim): words for aim, words in shortages.items()},
    }


def _best_as_dict(plan: Plan, best: Best) -> dict[str, Any]:
    machines, memory = plan.profiles.machines, Memory(plan.profiles, plan.asked)
    missing = unknown(Formulas(plan.profiles, plan.asked), best.cut, plan.asked)
    is_missing = {name for name in asdict(best.figures) if missing.get(name.removesuffix("_with_drafts"))}
    return {
        "stages": [
            {
                "name": machines[m].name,
                "layers": end - start,
                "weights": memory.weights(start, end, is_half=bool(machines[m].across)),
                **({"across": list(machines[m].across)} if machines[m].across else {}),
            }
            for m, start, end in best.cut.stages()
        ],
        "figures": asdict(best.figures) | dict.fromkeys(is_missing),
        "why": list(why(plan, best)),
    }
