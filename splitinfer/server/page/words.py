"""Figures in words: why each stage idles, and what would help. Pure.

A pipeline of N stages is full while N steps are under way. If it is not full, the causes are the causes of the gaps
(``core.metrics.gaps``); this module explains them to readers who do not know what a pipeline is. A rule comes before
the rules that it makes meaningless: first a pipeline that is down, then one that rests, then its bottleneck.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from splitinfer.core.metrics.gaps import Cause
from splitinfer.server.page.figures import PipelineSeen

_RESTS = 0.02  # share of the time under way; below it, the pipeline counts as idle
_BUSY = 0.85  # share of a stage's time; from here on it hardly waits
_MUCH = 0.15  # share of a stage's time, or of all rows, that is worth a sentence
_MOSTLY = 0.5
_UNEVEN = 0.2  # between the duties of two stages
_FULL = 0.9  # of the memory for KV
_FEW_RIGHT, _MANY_RIGHT = 0.5, 0.7  # of the drafts
_WAIT = (Cause.UPSTREAM, Cause.DOWNSTREAM)


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence or two about the pipeline. ``code``: identifies the remark, for tests and pictures. ``stage``: the
    number of its stage; ``None``: all stages. ``help``: a change that would help, or an empty text."""

    code: str
    text: str
    help: str = ""
    stage: int | None = None


def remarks(seen: PipelineSeen) -> list[Remark]:
    """Return what there is to say, the most important first; never nothing."""
    if (down := _down(seen)) is not None:
        return [down]
    away = [Remark("absent", seen.health.absent)] if seen.health.absent is not None else []
    if seen.under_way < _RESTS and not seen.running and not seen.waiting:
        return [*away, Remark("rests", "No requests, so all stages are idle.")]
    if all(stage.duty == 0 and not stage.gaps for stage in seen.stages):
        return [*away, Remark("begins", "A request has just begun; it has no figures yet.")]
    found = [*away, *_load(seen), *_flow(seen), *_drafts(seen), *_machines(seen), *_queue(seen)]
    return found or [Remark("fine", _mixture(seen))]


def _down(seen: PipelineSeen) -> Remark | None:
    health = seen.health
    if health.failure is not None:
        help_ = "Start it again; its log has the details."
        return Remark("failed", f"The pipeline has failed: {health.failure}.", help_)
    if seen.is_draining:
        return Remark("draining", "The server is shutting down: running answers may finish, new ones are refused.")
    if health.is_changing:
        return Remark(
            "recut",
            "Answers pause while the stages load another cut of the layers. Their KV is recomputed, "
            "and no token is lost.",
        )
    if health.waits_for is not None:
        return Remark(
            "lost",
            f"Answers pause: they wait for {health.waits_for}. Their KV is recomputed, and no token is lost.",
            "Start the worker on that machine again, or check that it is awake and its cable is in.",
        )
    return None


# -- how full the pipeline is ----------------------------------------------------------------------


def _load(seen: PipelineSeen) -> Iterator[Remark]:
    num_stages = len(seen.stages)
    if num_stages == 1:
        yield Remark("one_stage", f"{_name(seen, 0)} holds all layers, so it waits for no other stage.")
        return
    is_full, reads = all(stage.duty >= _BUSY for stage in seen.stages), _reads(seen)
    if reads:
        text = (
            f"A prompt is being read: prompts are {_percent(_prompt_share(seen))} of what the stages compute. Its "
            "chunks follow each other through the stages, and answers get their tokens in between."
        )
        help_ = "If answers stall meanwhile, a smaller token_budget makes the chunks shorter."
        yield Remark("prompt", text, "" if seen.running <= 1 else help_)
    if is_full:
        yield Remark("full", f"All {num_stages} stages compute nearly all the time: the pipeline is full.")
    if not is_full and not reads and 0 < seen.running < num_stages and _waits(seen) >= _MUCH:
        yield _few_streams(seen)


def _few_streams(seen: PipelineSeen) -> Remark:
    """Return the remark on fewer answers than stages; drafts let stages work ahead for one."""
    num_stages, one = len(seen.stages), seen.running == 1
    text = (
        f"{'There is one answer' if one else f'There are {seen.running} answers'} for {num_stages} stages. Each is at "
        f"one stage at a time, so each stage waits {_percent(_waits(seen))} of the time for others."
    )
    help_ = f"{num_stages} or more answers at once would keep all stages busy."
    if seen.rows.draft:
        text += " Drafts let the stages work ahead on guessed tokens."
    elif one and seen.drafter is None:
        help_ += " A draft model (draft: in the layout) keeps several tokens of one in flight."
    elif one:
        help_ += " Drafts are off for this answer: they made it slower, or it has only just begun."
    return Remark("few_streams", text, help_)


# -- what lies between stages ----------------------------------------------------------------------


def _flow(seen: PipelineSeen) -> Iterator[Remark]:
    """Yield one stage that holds up the others, and links and hosts that take long."""
    if (slow := _slowest(seen)) is not None:
        yield slow
    for number, stage in enumerate(seen.stages):
        share, name = _percent(stage.gap(Cause.LINK)), _name(seen, number)
        if stage.gap(Cause.LINK) >= _MUCH:
            yield Remark(
                "link",
                f"{name} waits {share} of the time for what is on its way to it{_way(seen, number)}.",
                "Use a cable instead of Wi-Fi; Thunderbolt has the lowest latency. For long prompts, codec: int8 in "
                "the layout halves what is sent.",
                number,
            )
    for number, stage in enumerate(seen.stages):
        share, name = _percent(stage.gap(Cause.HOST)), _name(seen, number)
        if stage.gap(Cause.HOST) >= _MUCH:
            help_ = "Close other programs on that machine, and turn Low Power Mode off."
            if number == 0 and seen.rows.draft:
                help_ += " N-gram drafts (draft: ngram in the layout) cost least."
            yield Remark("host", f"{name} is held up {share} of the time by its own processor.", help_, number)


def _way(seen: PipelineSeen, number: int) -> str:
    """Return how long hidden states take to a stage; to the first one, only tokens come back."""
    way = seen.links[number - 1].way_ms if 0 < number <= len(seen.links) else None
    return "" if way is None else f", {way:.1f} ms for each step"


def _slowest(seen: PipelineSeen) -> Remark | None:
    """Return a stage that computes while the others wait for it; it takes as many answers as stages to show."""
    duties = [stage.duty for stage in seen.stages]
    most, least = max(duties), min(duties)
    if len(duties) < 2 or most - least < _UNEVEN or (seen.running < len(duties) and not _reads(seen)):
        return None
    slow, quick = duties.index(most), duties.index(least)
    slow_name, quick_name = (f"stage {seen.stages[number].name}" for number in (slow, quick))
    if sum(map(seen.stages[quick].gap, _WAIT)) < _MUCH:
        return None
    return Remark(
        "uneven",
        f"{_name(seen, slow)} computes {_percent(most)} of the time, {quick_name} {_percent(least)}: the others wait "
        f"for {slow_name}.",
        f"Move layers from {slow_name} to {quick_name} in the layout.",
        slow,
    )


# -- drafts ----------------------------------------------------------------------------------------


def _drafts(seen: PipelineSeen) -> Iterator[Remark]:
    if not seen.rows.draft or seen.acceptance is None or (seen.void < _MUCH and seen.acceptance < _MANY_RIGHT):
        return
    text = f"{_percent(seen.acceptance)} of the drafts are right"
    text += f"; {_percent(seen.void)} of what the stages compute is discarded." if seen.void >= _MUCH else "."
    is_bad = seen.void >= _MUCH and seen.acceptance < _FEW_RIGHT
    yield Remark("drafts", text, "Try another draft model, or MODEL+ngram; repetitive text drafts best." * is_bad)


# -- machines and the queue ------------------------------------------------------------------------


def _machines(seen: PipelineSeen) -> Iterator[Remark]:
    """Yield remarks about full KV memory and its effects."""
    for number, stage in enumerate(seen.stages):
        if stage.kv_budget and stage.kv >= _FULL * stage.kv_budget:
            yield Remark(
                "kv_full",
                f"{_name(seen, number)} uses {_percent(stage.kv / stage.kv_budget)} of its KV memory, which "
                "holds what the model remembers of the running conversations.",
                f"Run shorter or fewer conversations, or give stage {stage.name} fewer layers.",
                number,
            )
            break
    if seen.preemptions > 0:
        one = seen.preemptions == 1
        yield Remark(
            "preempted",
            f"{'An answer was' if one else f'{seen.preemptions} answers were'} preempted to make room for others, and "
            "will be recomputed later: there is too little KV memory.",
            "Lower max_running, or run shorter conversations.",
        )


def _queue(seen: PipelineSeen) -> Iterator[Remark]:
    if not seen.waiting:
        return
    who = "1 request waits" if seen.waiting == 1 else f"{seen.waiting:,} requests wait"
    if seen.max_running and seen.running >= seen.max_running:
        text = f"{who}: {seen.running} are running, which is the maximum."
        yield Remark("queue_full", text, "Raise max_running, if there is KV memory for it.")
    else:
        yield Remark("queue", f"{who} until the previous prompt is read or KV memory is free.")


# -- parts -----------------------------------------------------------------------------------------


def _mixture(seen: PipelineSeen) -> str:
    duty = _percent(sum(stage.duty for stage in seen.stages) / len(seen.stages))
    answers = "1 answer is" if seen.running == 1 else f"{seen.running} answers are"
    return f"{answers} running, and the stages compute {duty} of the time."


def _prompt_share(seen: PipelineSeen) -> float:
    rows = seen.rows
    return rows.prefill / max(1, rows.prefill + rows.decode + rows.draft)


def _reads(seen: PipelineSeen) -> bool:
    return _prompt_share(seen) >= _MOSTLY


def _waits(seen: PipelineSeen) -> float:
    """Return the mean share of time that stages wait for each other or for a link."""
    waits = (*_WAIT, Cause.LINK)
    return sum(stage.gap(cause) for stage in seen.stages for cause in waits) / len(seen.stages)


def _name(seen: PipelineSeen, number: int) -> str:
    return f"Stage {seen.stages[number].name}"


def _percent(share: float) -> str:
    """Return a share in per cent.

    >>> _percent(0.004), _percent(0.456), _percent(1.0)
    ('under 1 %', '46 %', '100 %')
    """
    return "under 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
