"""The doctor's findings, as a JSON document and as text."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from splitinfer.core.json_text import dumps
from splitinfer.core.wire_codec import NONE
from splitinfer.doctor.advice import Hidden, LinkAdvice, pipeline_seconds
from splitinfer.doctor.findings.finding import Finding, Severity
from splitinfer.doctor.findings.memory import good_limit
from splitinfer.doctor.findings.rdma import Requirement, State, verdict
from splitinfer.doctor.links import LinkSeen, SurveyResult, WorkerSeen
from splitinfer.doctor.machine import Machine
from splitinfer.models.memory import size

_MARKS = {State.OK: ("✓", "green"), State.MISSING: ("✗", "red"), State.UNKNOWN: ("?", "yellow")}
_FINDING_MARKS = {Severity.PROBLEM: ("✗", "red"), Severity.WARNING: ("!", "yellow"), Severity.NOTE: ("·", "dim")}
_PLAIN_WIDTH = 140  # columns where there is no terminal to say how many


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A layout's links, the hidden states on them, and advice on each measured link that carries hidden states."""

    name: str
    hidden: Hidden
    result: SurveyResult
    advice: tuple[LinkAdvice | None, ...]  # one for each link

    @property
    def token_seconds(self) -> float | None:
        """Seconds that the links add to a generated token; ``None`` unless all were measured."""
        if not self.result.is_whole:
            return None
        back = self.result.links[-1].figures  # with two stages it is the same link
        assert back is not None
        return pipeline_seconds([each for each in self.advice if each is not None], back.latency_p50)


@dataclass(frozen=True, slots=True)
class Report:
    """This machine, the requirements of RDMA, a layout's links if there is one, and what was found wrong.

    ``origin``: how this process was started (``system.origin``).
    """

    machine: Machine
    rdma: tuple[Requirement, ...]
    layout: LayoutReport | None = None
    findings: tuple[Finding, ...] = ()
    origin: str = "unknown"


# -- as a document -----------------------------------------------------------------------------------------------------


def as_document(report: Report) -> dict[str, Any]:
    """The report as JSON can hold it: a bandwidth too high to measure is null."""
    found: dict[str, Any] = {
        "machine": asdict(report.machine),
        "rdma": {"verdict": asdict(verdict(report.rdma)), "findings": [asdict(each) for each in report.rdma]},
        "findings": [asdict(each) for each in report.findings],
        "origin": report.origin,
    }
    if report.layout is not None:
        found["layout"] = _layout_document(report.layout)
    finite: dict[str, Any] = _finite(found)
    return finite


def _layout_document(layout: LayoutReport) -> dict[str, Any]:
    links = zip(layout.result.links, layout.advice, strict=True)
    return {
        "name": layout.name,
        "hidden": {**asdict(layout.hidden), "num_bytes": layout.hidden.num_bytes},
        "workers": [asdict(worker) for worker in layout.result.workers],
        "links": [{**asdict(link), "advice": None if advice is None else asdict(advice)} for link, advice in links],
        "token_seconds": layout.token_seconds,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- as text -----------------------------------------------------------------------------------------------------------


def show(report: Report, *, as_json: bool) -> None:
    """Print the report to standard output: as text, or as one JSON document."""
    out = Console(highlight=False)
    if as_json:
        out.file.write(dumps(as_document(report), indent=2) + "\n")
        return
    if not out.is_terminal:
        out.width = max(out.width, _PLAIN_WIDTH)
    parts = [*_findings(report.findings), *_machine(report.machine), *_rdma(report.rdma)]
    for part in parts if report.layout is None else [*parts, *_layout(report.layout)]:
        out.print(part, soft_wrap=isinstance(part, Text))  # the terminal wraps text, so that commands can be copied


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in rows:
        grid.add_row(name, Text(text))
    return grid


def _machine(machine: Machine) -> list[RenderableType]:
    v = machine.versions
    rows = [
        ("system", f"{machine.system}, Python {machine.python}"),
        ("chip", f"{machine.chip}, {machine.processors} processors"),
        ("memory", f"{size(machine.memory)}, {size(machine.free)} free for a stage{_gpu_memory(machine)}"),
        ("versions", f"splitinfer {v.splitinfer}, protocol {v.protocol}, mlx {v.mlx}, mlx-lm {v.mlx_lm}"),
        ("MLX computes on", f"{machine.backend}" + (f" ({machine.device})" if machine.device != "cpu" else "")),
    ]
    if machine.memory_kinds is not None:
        kinds = [
            f"{name} {size(num_bytes)}" for name, num_bytes in machine.memory_kinds.items() if name != "compressible"
        ]
        swap = f", swap files {size(machine.swap_used)}" if machine.swap_used else ""
        rows.insert(3, ("of it", ", ".join(kinds) + swap))
    if machine.blas is not None:
        rows.append(("BLAS", machine.blas))
    if machine.kv_disk_free is not None:
        rows.append(("disk for KV", f"{size(machine.kv_disk_free)} free at {machine.kv_folder}"))
    return [_title(f"This machine: {machine.name}"), _grid(rows)]


def _gpu_memory(machine: Machine) -> str:
    if machine.working_set is None:
        return ""
    words = f"; the GPU may hold {size(machine.working_set)}"
    if machine.wired_limit_mb:
        return f"{words}, set by iogpu.wired_limit_mb={machine.wired_limit_mb}"
    return f"{words}; more with: sudo sysctl iogpu.wired_limit_mb={good_limit(machine.memory)}"


def _findings(found: Sequence[Finding]) -> list[Text]:
    if not found:
        return [Text("Nothing was found that keeps stages from running here.", style="green")]
    counts = Counter(each.severity for each in found)
    title = ", ".join(_counted(counts[severity], severity) for severity in Severity if counts[severity])
    lines = [_marked(_FINDING_MARKS[each.severity], each.area, each.text, each.remedy) for each in found]
    return [Text(title, style="bold"), *lines]


def _counted(count: int, severity: Severity) -> str:
    return f"{count} {severity}{'s' if count > 1 else ''}"


def _rdma(found: Sequence[Requirement]) -> list[Text]:
    """The verdict, and what stands in the way."""
    missing = [each for each in found if each.state is not State.OK]
    return [
        _title(f"RDMA over Thunderbolt: {verdict(found).text}"),
        *[_marked(_MARKS[each.state], each.about, each.text, each.remedy) for each in missing],
    ]


def _marked(mark: tuple[str, str], subject: str, sentence: str, remedy: str) -> Text:
    """A line with a mark in its colour, and the remedy on a line of its own, from where it can be copied."""
    text = Text.assemble(mark, f" {subject}: {sentence}")
    return text.append(f"\n  → {remedy}", style="dim") if remedy else text


def _layout(layout: LayoutReport) -> list[RenderableType]:
    hidden = layout.hidden
    source = (
        f"of {hidden.source}" if hidden.source != "assumed" else "assumed: the layout's model is not on this machine"
    )
    return [
        _title(f"Layout {layout.name}"),
        *map(_worker, layout.result.workers),
        _title(f"Links, for tokens of {hidden.values} values in {size(hidden.num_bytes)} ({source})"),
        _links(layout),
        *[Text(f"{link.source} → {link.target}: not measured: {why}") for link, why in _failed(layout.result)],
        *[Text(f"{link.source} → {link.target}: {link.note}") for link in layout.result.links if link.note],
        *[Text(sentence) for sentence in _sentences(layout)],
    ]


def _failed(result: SurveyResult) -> list[tuple[LinkSeen, str]]:
    """The links without figures, and why; a worker's problem, which is shown with the worker, is not repeated."""
    of_workers = {worker.problem: f"{worker.name} is not reached" for worker in result.workers if worker.problem}
    failed = [link for link in result.links if link.figures is None]
    return [(link, of_workers.get(link.problem, link.problem)) for link in failed]


def _worker(worker: WorkerSeen) -> Text:
    where = f"{worker.name} ({worker.address})"
    if worker.welcome is None:
        return Text(f"✗ {where}: {worker.problem}", style="red")
    line = f"✓ {where}: {worker.welcome.name}, {worker.welcome.device}, {size(worker.welcome.free_bytes)} free"
    if worker.clock is not None:
        line += f", clock {_time(worker.clock.offset, signed=True)} ± {_time(worker.clock.uncertainty)} from ours"
    if worker.problem:
        line += f"; {worker.problem}"
    return Text(line)


def _links(layout: LayoutReport) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("link", "left"), ("by", "left"), ("carries", "left"), ("latency p50", "right"), ("p99", "right"),
        ("down", "right"), ("up", "right"), ("a token", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for link, advice in zip(layout.result.links, layout.advice, strict=True):
        if link.figures is not None:
            f = link.figures
            table.add_row(
                f"{link.source} → {link.target}", link.transport, link.carries, _time(f.latency_p50),
                _time(f.latency_p99), _rate(f.down), _rate(f.up), "" if advice is None else _time(advice.token_seconds),
            )  # fmt: skip
    return table


def _sentences(layout: LayoutReport) -> list[str]:
    found = [
        _advice(link, advice)
        for link, advice in zip(layout.result.links, layout.advice, strict=True)
        if advice is not None
    ]
    if layout.token_seconds is not None:
        found.append(f"The links add {_time(layout.token_seconds)} to each generated token, there and back.")
    return found


def _advice(link: LinkSeen, advice: LinkAdvice) -> str:
    choice = advice.choice
    if choice.codec == NONE:
        codec = "codec none: the link is quicker than packing prompts"
    else:
        codec = (
            f"codec {choice.codec}: {_time(choice.seconds)} for a prompt's token instead of "
            f"{_time(choice.seconds_plain)}, if {link.target} packs as quickly as this machine"
        )
    chunk = f"chunks that take a stage {_time(advice.chunk_seconds)} or more, 20 latencies"
    if advice.chunk_rows is not None:
        chunk += f" (from {advice.chunk_rows} tokens on their bytes alone do)"
    return (
        f"{link.source} → {link.target}: {codec}; {chunk}; sending hides where a stage takes over "
        f"{_time(advice.row_seconds)} to compute a prompt's token."
    )


def _time(seconds: float, *, signed: bool = False) -> str:
    """
    >>> _time(0.00025), _time(0.0123), _time(-2.5, signed=True), _time(0.0)
    ('250 µs', '12.3 ms', '-2.5 s', '0 µs')
    """
    sign = "+" if signed and seconds >= 0 else ""
    if abs(seconds) < 0.9995e-3:
        return f"{sign}{seconds * 1e6:.3g} µs"
    if abs(seconds) < 0.9995:
        return f"{sign}{seconds * 1e3:.3g} ms"
    return f"{sign}{seconds:,.4g} s"


def _rate(bandwidth: float) -> str:
    return "too high to tell" if math.isinf(bandwidth) else f"{size(bandwidth)}/s"
