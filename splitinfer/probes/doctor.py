"""``splitinfer doctor``: names faults of this machine, tells whether RDMA can work, and times links, in seconds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from splitinfer.common.json_text import dumps
from splitinfer.common.plain_text import size
from splitinfer.core.codecs import NONE
from splitinfer.core.layout import Layout
from splitinfer.core.link_transport import RING
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.errors import ConfigError, WorkerUnreachable
from splitinfer.places import caches
from splitinfer.probes import parsing
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.evidence import SeenHere, look
from splitinfer.probes.finding import Finding, Outcome
from splitinfer.probes.findings import every_finding, good_wired_limit
from splitinfer.probes.links import (
    Hidden,
    LinkAdvice,
    LinkSeen,
    LinkSurvey,
    SayProgress,
    WorkerSeen,
    advise,
    codecs_of,
    hidden_of,
)
from splitinfer.probes.machine import description
from splitinfer.probes.page import counted, grid, lines, print_page, title
from splitinfer.probes.rdma import requirements, verdict
from splitinfer.system.disk import read_speed

_BLOCK = 2 * 2**20  # bytes of a tensor of an expert: 0.6 MB in 30B models, 7 MB in those of 700B, in 4 bits


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A layout's workers and links, and the hidden states on them. ``sums``: sentences on the sums of stages across two
    machines."""

    name: str
    hidden: Hidden
    workers: Sequence[WorkerSeen]
    links: Sequence[LinkSeen]
    sums: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        return all(link.figures is not None for link in self.links)

    @property
    def token_seconds(self) -> float | None:
        """Seconds that the links add to a generated token: every hop down, and the result's way back. ``None`` unless
        all were measured."""
        back = self.links[-1].figures  # with two stages it is the same link
        if back is None or not self.is_whole:
            return None
        return sum(link.advice.token_seconds for link in self.links if link.advice is not None) + back.latency_p50


def show(seen: SeenHere, links: LayoutReport | None, *, as_json: bool) -> int:
    """Print it; the exit code, 1 if a link could not be measured."""
    machine, found, rdma = _machine_of(seen), every_finding(seen), requirements(seen)
    if as_json:
        document = {
            "machine": machine,
            "rdma": {"verdict": _plain(verdict(rdma)), "findings": [_plain(each) for each in rdma]},
            "findings": [_plain(each) for each in found],
            "origin": str(seen.origin),
            **({} if links is None else {"layout": _layout_document(links)}),
        }
        Console().file.write(dumps(document, indent=2) + "\n")
    else:
        print_page(_page(machine, found, rdma, links))
    return 0 if links is None or links.is_whole else 1


def _machine_of(seen: SeenHere) -> dict[str, Any]:
    """Return this machine, with what its commands say of memory and version."""
    version = seen.read("macos", parsing.version)
    said = {} if version is None else {"system_version": ".".join(map(str, version))}
    kinds, limit = seen.pages and seen.pages.by_category(), seen.wired_limit and seen.wired_limit // 2**20
    speed = {"disk_block": _BLOCK, "disk_bytes_per_second": read_speed(caches(), _BLOCK)}
    return {**description(), **said, **speed, "memory_kinds": kinds, "wired_limit_mb": limit}


def survey_layout(layout: Layout, connect_timeout: float, notice: SayProgress) -> LayoutReport:
    workers, links = LinkSurvey(layout, connect_timeout, notice).run()
    hidden = hidden_of(layout)
    codecs = codecs_of(hidden) if any(link.figures for link in links) else []
    for i, link in enumerate(links):
        if link.figures is not None and link.carries == "hidden states":
            links[i] = replace(link, advice=advise(link.figures, hidden, codecs))
    return LayoutReport(layout.name, hidden, workers, links, tuple(sums_in_words(layout, links)))


def sums_in_words(layout: Layout, links: Sequence[LinkSeen]) -> Iterator[str]:
    """Yield what the sums of each stage across two machines cost, as far as the link between these was measured,
    whether they are less secret than links, and why they would be refused."""
    for stage in layout.stages:
        if not stage.across:
            continue
        ways = {(link.source, link.target): link for link in links}
        first, second = stage.ranks
        way, count = ways.get((first.name, second.name)), 2 * stage.num_layers
        if way is not None and way.figures is not None and stage.sums == RING:
            each = 2 * way.figures.latency_p50
            yield f"{stage.name}: about {count} sums a token, each some {_time(each)}: {_time(count * each)} a token."
        if any(rank.key for rank in stage.ranks):
            yield f"{stage.name}: the links to its workers are encrypted, its sums over {stage.sums} are not."
        try:
            halves_of(stage, insecure=False)
        except (ConfigError, WorkerUnreachable) as error:
            said = str(error)
            yield f"{said[:1].upper()}{said[1:]}."


def measure(_options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report, as a probe of ``selftest``, the doctor's findings and whether RDMA can be used."""
    seen = look(None)
    report(verdict(requirements(seen)), *every_finding(seen))


# -- as a document -----------------------------------------------------------------------------------------------------


def _plain(finding: Finding) -> dict[str, str]:
    return {name: str(getattr(finding, name)) for name in ("name", "outcome", "sentence", "remedy")}


def _layout_document(layout: LayoutReport) -> dict[str, Any]:
    hidden = {**asdict(layout.hidden), "num_bytes": layout.hidden.num_bytes}
    return {**asdict(layout), "hidden": hidden, "token_seconds": layout.token_seconds}


# -- as text -----------------------------------------------------------------------------------------------------------


def _page(
    machine: Mapping[str, Any], found: Sequence[Finding], rdma: Sequence[Finding], layout: LayoutReport | None
) -> list[RenderableType]:
    """Return the report for a person, faults first."""
    well: list[RenderableType] = [Text("Nothing was found that keeps stages from running here.", style="green")]
    wrong: list[RenderableType] = [Text(counted(found), style="bold"), *lines(found)]
    missing = [each for each in rdma if each.outcome is not Outcome.PASSED]
    return [
        *(wrong if found else well),
        *(title(f"This machine: {machine['name']}"), grid(_machine(machine))),
        *(title("RDMA over Thunderbolt"), Text(verdict(rdma).sentence), *lines(missing)),
        *([] if layout is None else _layout(layout)),
    ]


def _machine(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    system = {"Darwin": "macOS"}.get(machine["system"], machine["system"])
    memory = f"{size(machine['memory_bytes'])}, {size(machine['free_bytes'])} free for a stage{_gpu_memory(machine)}"
    versions = [
        f"{name.replace('_', '-')} {machine[f'version_{name}']}" for name in ("splitinfer", "protocol", "mlx", "mlx_lm")
    ]
    device = "" if machine["device"] == "cpu" else f" ({machine['device']})"
    rows = [
        ("system", f"{system} {machine['system_version']}, Python {machine['python']}"),
        ("chip", f"{machine['chip']}, {machine['processors']} processors"),
        ("memory", memory),
        ("versions", ", ".join(versions)),
        ("MLX computes on", f"{machine['backend']}{device}"),
    ]
    if machine["memory_kinds"] is not None:
        kinds = [f"{name} {size(count)}" for name, count in machine["memory_kinds"].items() if name != "compressible"]
        swap = [f"swap files {size(machine['swap_used_bytes'])}"] if machine["swap_used_bytes"] else []
        rows.insert(3, ("of it", ", ".join([*kinds, *swap])))
    if machine["blas"] is not None:
        rows.append(("BLAS", machine["blas"]))
    if machine["disk_bytes_per_second"]:
        speed, block = size(round(machine["disk_bytes_per_second"])), size(machine["disk_block"])
        rows.append(("disk", f"reads {speed} a second in blocks of {block}, about an expert's tensor"))
    if machine["kv_disk_free"] is not None:
        rows.append(("disk for KV", f"{size(machine['kv_disk_free'])} free at {machine['kv_folder']}"))
    return rows


def _gpu_memory(machine: Mapping[str, Any]) -> str:
    if machine["working_set_bytes"] is None:
        return ""
    words = f"; the GPU may hold {size(machine['working_set_bytes'])}"
    if machine["wired_limit_mb"]:
        return f"{words}, set by iogpu.wired_limit_mb={machine['wired_limit_mb']}"
    return f"{words}; more with: sudo sysctl iogpu.wired_limit_mb={good_wired_limit(machine['memory_bytes'])}"


def _layout(layout: LayoutReport) -> list[RenderableType]:
    hidden, total = layout.hidden, layout.token_seconds
    is_known = hidden.source != "assumed"
    source = f"of {hidden.source}" if is_known else "assumed: the layout's model is not on this machine"
    return [
        title(f"Layout {layout.name}"),
        *map(_worker, layout.workers),
        title(f"Links, for tokens of {hidden.values} values in {size(hidden.num_bytes)} ({source})"),
        _links(layout),
        *[Text(f"{_name(link)}: not measured: {_why(link, layout)}") for link in layout.links if not link.figures],
        *[Text(f"{_name(link)}: {link.note}") for link in layout.links if link.note],
        *[Text(_advice(link, link.advice)) for link in layout.links if link.advice is not None],
        *map(Text, layout.sums),
        *([] if total is None else [Text(f"The links add {_time(total)} to each generated token, there and back.")]),
    ]


def _why(link: LinkSeen, layout: LayoutReport) -> str:
    """Return why there are no figures; a worker's problem, which is shown with the worker, is not repeated."""
    of_workers = {worker.problem: f"{worker.name} is not reached" for worker in layout.workers}
    return of_workers.get(link.problem, link.problem)


def _worker(worker: WorkerSeen) -> Text:
    where = f"{worker.name} ({worker.address})"
    if worker.welcome is None:
        return Text(f"✗ {where}: {worker.problem}", style="red")
    line = f"✓ {where}: {worker.welcome.name}, {worker.welcome.device}, {size(worker.welcome.free_bytes)} free"
    return Text(f"{line}; {worker.problem}" if worker.problem else line)


def _links(layout: LayoutReport) -> Table:
    table = Table("link", "by", "carries", box=None, pad_edge=False)
    for name in ("latency p50", "p99", "down", "up", "a token"):
        table.add_column(name, justify="right")
    for link in layout.links:
        if (f := link.figures) is not None:
            times, rates = map(_time, (f.latency_p50, f.latency_p99)), map(_rate, (f.down, f.up))
            token = "" if link.advice is None else _time(link.advice.token_seconds)
            table.add_row(_name(link), link.transport, link.carries, *times, *rates, token)
    return table


def _name(link: LinkSeen) -> str:
    return f"{link.source} → {link.target}"


def _advice(link: LinkSeen, advice: LinkAdvice) -> str:
    plain = _time(advice.row_seconds_plain)
    if advice.codec == NONE:
        return f"{_name(link)}: no codec would help; sending a prompt's token takes {plain}."
    return (
        f"{_name(link)}: codec {advice.codec} sends a prompt's token in {_time(advice.row_seconds)} instead of "
        f"{plain}, if {link.target} packs as fast as this machine. It helps only a stage that computes a token faster."
    )


def _time(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> _time(0.00025), _time(0.0123), _time(2.5), _time(0.0)
    ('250 µs', '12.3 ms', '2.5 s', '0 µs')
    """
    if abs(seconds) < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.4g} s"


def _rate(bandwidth: float) -> str:
    return "too high to tell" if math.isinf(bandwidth) else f"{size(bandwidth)}/s"
