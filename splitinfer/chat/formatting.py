"""Formats statistics for reading: the status line after an answer, and the tables of /stats, /layout and /set."""

import io
from collections.abc import Mapping, Sequence
from itertools import compress, pairwise
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitinfer.common.plain_text import duration, seconds, size, wrapped
from splitinfer.core.codecs import NONE
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.sampling_defaults import SETTABLE, Origin, ResolvedSampling
from splitinfer.engine.figures.health import StageState
from splitinfer.engine.loop.requests import Reading, RequestOutput
from splitinfer.placement.comparison import Comparison

_ENDINGS = {"stop": "complete", "length": "token limit reached", "abort": "stopped", "error": "failed"}
_STATS = ("stage", "layers", "device", "weights", "busy", "steps", "sent")  # columns of /stats
Stats = Mapping[str, Any]  # what LLM.stats returns
LOOK_EVERY = 0.5  # seconds between two looks at how far a prompt is read
ERASE = "\r\x1b[K"  # the line
_NARROW = 60  # cells of a terminal in which /layout is a list
_ANY_WIDTH = 10_000
_LEAST_CELL = 13  # cells of a column in which words wrap


def status(output: RequestOutput, before: Stats, after: Stats) -> list[str]:
    """Return the figures of one answer in short phrases, also while it runs; ``before`` and ``after``: the counters
    around it."""
    times = output.token_times
    phrases = []
    if len(times) > 1 and times[-1] > times[0]:
        phrases.append(f"{(len(times) - 1) / (times[-1] - times[0]):.1f} tok/s")
    if times:
        phrases.append(f"first token {seconds(times[0])}")
    phrases.append(f"busy {_busy(before, after)}")
    computed = after["computed_tokens"] - before["computed_tokens"]
    if len(after["stages"]) > 1 and computed > 0:
        phrases.append(f"{size((_sent(after) - _sent(before)) / computed)}/token")
    phrases.append(f"prompt {output.num_prompt_tokens:,}, cached {output.num_cached_tokens:,}")
    tried, right = (now - was for now, was in zip(_drafts(after), _drafts(before), strict=True))
    if tried:
        phrases.append(f"drafts {percent(right / tried)} right")
    ending = f", {_ENDINGS[output.finish_reason]}" if output.finish_reason else ""
    phrases.append(f"answer {len(output.token_ids):,}{ending}")
    return phrases


def progress(reading: Reading) -> str:
    """Return how far a prompt is read.

    >>> progress(Reading(512, 1850, 0, 15.3)), progress(Reading(0, 1850, 0, 1.0))
    ('reading 512 of 1,850, 40 s left', 'reading 1,850 tokens')
    """
    if reading.seconds_left is None:
        return f"reading {reading.total - reading.read:,} tokens"
    return f"reading {reading.read:,} of {reading.total:,}, {duration(reading.seconds_left)} left"


def _busy(before: Stats, after: Stats) -> str:
    shares = zip(after["stages"], _shares(before, after), strict=True)
    return " ".join(f"{stage['name']} {percent(share)}" for stage, share in shares)


def _shares(before: Stats, after: Stats) -> list[float]:
    """Return the share of the active time between two readings that each stage spent computing, from 0 to 1."""
    active = after["active_seconds"] - before["active_seconds"]
    both = zip(before["stages"], after["stages"], strict=True)
    return [(now["busy_seconds"] - was["busy_seconds"]) / active if active > 0 else 0.0 for was, now in both]


def _drafts(stats: Stats) -> tuple[int, int]:
    """Return the numbers of verified and of accepted draft tokens."""
    found = stats.get("speculation")
    return (sum(found["tried_at"]), found["accepted"]) if found else (0, 0)


def _sent(stats: Stats) -> float:
    return float(sum(stage["bytes_sent"] for stage in stats["stages"]))


def stats_table(layout: Layout, stats: Stats, width: int | None = None) -> str:
    """Return the text that /stats shows, in ``width`` cells; ``None``: however many it takes."""
    rows = list[tuple[str, ...]]()
    for spec, stage in zip(layout.stages, stats["stages"], strict=True):
        rows.append(
            (
                *(spec.name, layers(spec), stage.get("device", ""), _size(stage.get("weight_bytes"))),
                *(percent(stage["busy_percent"] / 100), f"{stage['steps']:,}", size(stage["bytes_sent"])),
            )
        )
    finished = ", ".join(f"{count:,} {_ENDINGS[reason]}" for reason, count in sorted(stats["finished"].items()))
    totals = (
        f"{stats['prompt_tokens']:,} prompt tokens ({stats['cached_tokens']:,} cached), "
        f"{stats['generated_tokens']:,} generated, {size(stats['bytes_per_token'])} per token, "
        f"{seconds(stats['active_seconds'])} at work\n"
        f"answers: {finished or 'none yet'}"
    )
    totals += "".join(f"\n{line}" for line in _packed(stats))
    tried, right = _drafts(stats)
    if tried:
        found, lost = stats["speculation"], stats["speculation"]["sent"] - right
        totals += (
            f"\ndrafts by {found['drafter']}: {right:,} of {found['sent']:,} drafted tokens accepted, "
            f"{lost:,} discarded ({tried - right:,} wrong, {lost - (tried - right):,} behind a wrong one)"
        )
    return f"{columns(_STATS, rows, width)}\n{totals}"


def held(output: RequestOutput, stats: Stats) -> int:
    """Return the tokens whose KV the stages can reuse after an answer: the last token was not computed, and where a
    link packs prompts, the answer's KV differs from that of the same tokens in a prompt."""
    answer = 0 if any(map(_packs, stats["stages"])) else len(output.token_ids) - 1
    return output.num_prompt_tokens + answer


def _packs(stage: Mapping[str, Any]) -> bool:
    return bool(stage.get("codec", NONE) != NONE)


def _packed(stats: Stats) -> list[str]:
    """Return a line for each link that packs prompts, with the number of rows that its codec could not hold."""
    lines = []
    for before, stage in pairwise(stats["stages"]):
        if _packs(before):
            unfit = f", but for {count:,} rows that it cannot hold" if (count := before["rows_unfit"]) else ""
            lines.append(f"prompts go from {before['name']} to {stage['name']} as {before['codec']}{unfit}")
    return lines


def layout_table(
    layout: Layout, now: Stats, before: Stats | None, held: int, states: Sequence[str] = (), width: int = 80
) -> str:
    """Return the text that /layout shows: what each stage holds and how busy it is. ``before``: the counters at the
    last look. ``held``: tokens whose KV is cached. ``states``: of the stages, shown if one is not ready."""
    lately = 0.0 if before is None else now["active_seconds"] - before["active_seconds"]
    cells = _layout_columns(layout, now, before if lately > 0 else None, held)
    if any(state != StageState.READY for state in states):
        cells["state"] = list(states)
    extras = {"model": layout.model, "draft": layout.draft, "dtype": None if layout.dtype == "auto" else layout.dtype}
    legend = {
        "KV": f"KV of the conversation's {held:,} tokens",
        "free": "free: as it was at the start",
        "busy": f"busy: share of the {seconds(now['active_seconds'])} spent answering",
        "lately": f"lately: the same of the {seconds(lately)} since the last look",
    }
    about = [f"{key} {value}" for key, value in extras.items() if value is not None] + [f"{layout.num_layers:,} layers"]
    about += [words for heading, words in legend.items() if heading in cells]
    rows = list(zip(*cells.values(), strict=True))
    shown = _below(list(cells), rows, width) if width < _NARROW else _drawn(cells, width)
    return f"{shown}\n{wrap(about, width, '; ')}"


def _layout_columns(layout: Layout, now: Stats, before: Stats | None, held: int) -> dict[str, list[str]]:
    """Return each column's cells by its heading, one for each stage. Leave out columns without any value."""
    stages = now["stages"]
    columns = {
        "stage": [spec.name for spec in layout.stages],
        "layers": [f"{layers(spec)} ({spec.num_layers})" for spec in layout.stages],
        "where": [
            ", ".join(filter(None, (where(spec), stage.get("device"))))
            for spec, stage in zip(layout.stages, stages, strict=True)
        ],
        "weights": [_size(stage.get("weight_bytes")) for stage in stages],
        "KV": [_size(stage.get("kv_bytes_per_token"), held) for stage in stages],
        "free": [_size(stage.get("free_bytes_when_loaded")) for stage in stages],
        "busy": [percent(stage["busy_percent"] / 100) for stage in stages],
    }
    if before is not None:
        columns["lately"] = [percent(share) for share in _shares(before, now)]
    return {heading: cells for heading, cells in columns.items() if any(cells)}


def _size(num_bytes: float | None, times: int = 1) -> str:
    return "" if num_bytes is None else size(num_bytes * times)


def _drawn(columns: Mapping[str, Sequence[str]], width: int) -> str:
    """Return the columns side by side, ``width`` cells in all: names and places wrap, figures do not."""
    drawn = Table(box=None, pad_edge=False, header_style="", padding=(0, 1))
    for heading in columns:
        if heading in ("stage", "where"):
            drawn.add_column(heading, overflow="fold")
        else:
            drawn.add_column(heading, justify="left" if heading == "layers" else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        drawn.add_row(*map(Text, row))
    return _as_text(drawn, width)


def comparison(found: Comparison, width: int) -> str:
    """Return ways to run a model side by side, in ``width`` cells; below each other where there is no room for that."""
    if width < _LEAST_CELL * (1 + len(found.headings)):
        names, *ways = zip(("", *found.headings), *found.rows, strict=True)
        return _below(names, ways, width)
    drawn = Table("", *found.headings, box=SIMPLE_HEAD, pad_edge=False, header_style="", show_edge=False)
    for row in found.rows:
        drawn.add_row(*map(Text, row))
    return _as_text(drawn, width)


def _as_text(drawn: Table, width: int) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=width, force_terminal=False, color_system=None).print(drawn)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def sampling_table(sampling: ResolvedSampling, reasoning: str) -> str:
    """Return the text that /set shows: the values in force, and where each comes from. ``reasoning``: the setting."""
    rows = [(name, setting(sampling, name), sampling.origin_of(name)) for name in SETTABLE]
    rows.append(("reasoning", reasoning or "usual", Origin.CHAT if reasoning else Origin.DEFAULT))
    return columns(("", "value", "from"), rows, None)


def setting(sampling: ResolvedSampling, name: str) -> str:
    """Return a value of the sampling in words."""
    value = getattr(sampling.params, name)
    return "off" if value is None else f"{value:g}"


def greeting(layout: Layout, context: int) -> str:
    """Return the one line above the first prompt."""
    parts = ", ".join(f"{spec.name} {layers(spec)}" for spec in layout.stages)
    return f"{layout.model}: layers {parts}; context {context:,} tokens. /help lists the commands."


def dropped(count: int, context: int) -> str:
    """Return the sentence about turns that were dropped to fit the context."""
    what = "the oldest turn was" if count == 1 else f"the {count:,} oldest turns were"
    return f"{what} dropped: the conversation no longer fits the {context:,} tokens of context"


def layers(spec: StageSpec) -> str:
    """Return a stage's first and last layer.

    >>> layers(StageSpec("back", 6, 12, "local"))
    '6-11'
    """
    return f"{spec.start}-{spec.end - 1}" if spec.num_layers > 1 else str(spec.start)


def where(spec: StageSpec) -> str:
    """Return the place of a stage in words, or the places of its halves."""
    if spec.across:
        return " and ".join(map(where, spec.ranks))
    if spec.address is None:
        return "here"
    return "local worker" if spec.is_local else spec.address


def percent(share: float) -> str:
    """Return a share in per cent: ``percent(0.414)`` is "41%"."""
    return f"{100 * share:.0f}%"


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return a table in ``width`` cells, ``None``: however many it takes. Its rows are below each other if there are
    too few. A column with nothing in it is left out.

    >>> columns(("host", "worker"), [("mini", "port 5577")], 16)
    'host  worker\\nmini  port 5577'
    >>> columns(("host", "worker"), [("mini", "port 5577")], 14)
    'mini\\n  worker: port\\n  5577'
    """
    drawn = Table(box=None, pad_edge=False, header_style="")
    shown = [any(column) for column in zip(*rows, strict=True)]
    for heading in compress(headings, shown):
        drawn.add_column(heading, no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, compress(row, shown)))
    needed = Console(width=_ANY_WIDTH).measure(drawn).maximum
    return _as_text(drawn, needed) if width is None or needed <= width else _below(headings, rows, width)


def _below(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return each row as its first cell and, below that, its other ones with their headings."""
    lines = list[str]()
    for first, *others in rows:
        lines += [first] if first else []
        lines += [f"  {name}: {cell}" for name, cell in zip(headings[1:], others, strict=True) if cell]
    return wrapped("\n".join(lines), width)


def wrap(phrases: Sequence[str], width: int, joint: str = " · ") -> str:
    """Return phrases on as few lines as ``width`` allows, none broken in two."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and cell_len(lines[-1] + joint + phrase) <= width:
            lines[-1] += joint + phrase
        else:
            lines.append(phrase)
    return "\n".join(lines)
