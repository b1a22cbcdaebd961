"""A plan as a layout file with comments, and as plain numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from splitinfer.core.layout import Layout, StageSpec, lay_out
from splitinfer.core.link_transport import OVER_TCP
from splitinfer.core.wire_codec import NONE
from splitinfer.machine.profile import MachineProfile
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.memory import Memory
from splitinfer.placement.plan import Best, Figures, Plan
from splitinfer.placement.words import aim_in_words, gigabytes, name_in_words, why

_WIDE = 10**6  # characters of a line of YAML: no line is broken


@dataclass(frozen=True, slots=True)
class Origin:
    """When and by what a plan was made, for its comments. ``profiles``: where the figures of machines came from."""

    date: str
    version: str
    profiles: str


def layout_of(plan: Plan, best: Best, base: Layout | None = None) -> Layout:
    """The layout of a cut. ``base``: has what a plan does not choose, such as codecs, transports and serving
    options."""
    known = {} if base is None else {stage.name: stage for stage in base.stages}
    machines = plan.profiles.machines
    stages = lay_out((machines[m].name, end - start, None) for m, start, end in best.cut.stages())
    specs = tuple(
        _stage(spec, machines[m], known.get(spec.name), is_first=i == 0)
        for i, (spec, m) in enumerate(zip(stages, best.cut.machines, strict=True))
    )
    model, draft = plan.profiles.model, plan.profiles.model.draft
    drafter = None if draft is None or plan.asked.acceptance is None else draft.name
    if base is None:
        return Layout(specs, model.name, drafter)
    return replace(base, stages=specs, model=model.name, draft=drafter)


def _stage(spec: StageSpec, machine: MachineProfile, known: StageSpec | None, *, is_first: bool) -> StageSpec:
    if is_first:
        return spec
    spec = replace(spec, address=machine.address, key=machine.key)
    return spec if known is None else replace(spec, codec=known.codec, link_transport=known.link_transport)


def layout_text(plan: Plan, best: Best, origin: Origin, base: Layout | None = None) -> str:
    """The layout file of a cut: figures, reasons and origin as comments."""
    return text_of(layout_of(plan, best, base), _comments(plan, best, origin), list(_rooms(plan, best)))


def text_of(layout: Layout, comments: Iterable[str], rooms: Sequence[str] = ()) -> str:
    """A layout as a file. ``comments``: lines before it; ``rooms``: a comment for each stage, if any."""
    lines = [f"# {line}" for line in comments]
    lines += [_flow({key: value}, braces=False) for key, value in _top(layout).items()]
    lines.append("stages:")
    rows = [f"  - {_flow(_of_stage(stage))}" for stage in layout.stages]
    width = max(map(len, rows))
    lines += [f"{row:{width}}  # {room}" for row, room in zip(rows, rooms, strict=True)] if rooms else rows
    return "\n".join(lines) + "\n"


def _comments(plan: Plan, best: Best, origin: Origin) -> Iterator[str]:
    yield f"Planned for {best.aim}: {aim_in_words(best.aim, plan.asked)}."
    yield from figures_in_words(best.figures, plan.asked)
    yield from why(plan, best)
    for aim, other in plan.best.items():
        if aim is not best.aim and other.cut != best.cut:
            yield f"Best for {aim} would be: {name_in_words(plan.profiles, other.cut)}."
    yield f"By splitinfer {origin.version} on {origin.date}, from {origin.profiles}."
    for machine in plan.profiles.machines:
        of = ", ".join(filter(None, (machine.device_name, machine.versions, machine.measured_at)))
        if of:
            yield f"{machine.name}: {of}."


def figures_in_words(figures: Figures, asked: Asked) -> Iterator[str]:
    """The figures of a cut, as lines."""
    with_drafts, of_many = "", ""
    if figures.one_with_drafts is not None and figures.many_with_drafts is not None:
        with_drafts = f", {figures.one_with_drafts:.3g} with drafts of which {asked.acceptance:.0%} are right"
        of_many = f", {figures.many_with_drafts:.3g} with drafts"
    yield f"Expected: {figures.one:.3g} tokens a second of one stream{with_drafts};"
    yield f"{figures.many:.3g} of {asked.streams} streams{of_many};"
    yield f"{figures.ttft:.3g} s to the first token of a prompt of 4,096; up to {figures.longest:,} tokens of context."


def _top(layout: Layout) -> dict[str, Any]:
    """The keys of a layout beside its stages, where they are not the defaults."""
    plain = Layout(layout.stages)
    found: dict[str, Any] = {
        name: getattr(layout, name)
        for name in ("model", "draft", "dtype", "kv_format", "float32_head")
        if getattr(layout, name) != getattr(plain, name)
    }
    options = {name: value for name, value in asdict(layout.serving).items() if value is not None}
    serving = {name: str(value) if isinstance(value, str) else value for name, value in options.items()}
    return {**found, "serving": serving} if serving else found


def _of_stage(stage: StageSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"name": stage.name, "layers": stage.num_layers}
    found |= {name: value for name in ("address", "key") if (value := getattr(stage, name)) is not None}
    if stage.codec != NONE:
        found["codec"] = stage.codec
    if stage.link_transport != OVER_TCP:
        link = asdict(stage.link_transport)
        found |= {name: value for name, value in link.items() if value is not None}
    return found


def _flow(mapping: dict[str, Any], *, braces: bool = True) -> str:
    """A mapping in one line of YAML."""
    text = yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=_WIDE, allow_unicode=True).strip()
    return text if braces else text[1:-1]


def _rooms(plan: Plan, best: Best) -> Iterator[str]:
    """What each stage takes of its machine, as a comment."""
    for machine, start, end in best.cut.stages():
        weights = Memory(plan.profiles, plan.asked).weights(start, end)
        yield f"weights {gigabytes(weights)} of {gigabytes(plan.profiles.machines[machine].free_bytes)} free"


def as_dict(plan: Plan, shortages: Mapping[Aim, str], origin: Origin) -> dict[str, Any]:
    """A plan as plain numbers. ``shortages``: what is lacking for the aims for which nothing fits, in words."""
    return {
        **asdict(origin),
        "model": plan.profiles.model.name,
        "machines": [machine.name for machine in plan.profiles.machines],
        "asked": asdict(plan.asked),
        "screened": plan.screened,
        "simulated": plan.simulated,
        "best": {str(aim): _best_as_dict(plan, best) for aim, best in plan.best.items()},
        "shortages": {str(aim): words for aim, words in shortages.items()},
    }


def _best_as_dict(plan: Plan, best: Best) -> dict[str, Any]:
    machines, memory = plan.profiles.machines, Memory(plan.profiles, plan.asked)
    return {
        "stages": [
            {"name": machines[m].name, "layers": end - start, "weights": memory.weights(start, end)}
            for m, start, end in best.cut.stages()
        ],
        "figures": asdict(best.figures),
        "why": why(plan, best),
    }
