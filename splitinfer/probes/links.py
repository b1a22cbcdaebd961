"""Opens, measures and closes every link of a layout, with no model loaded.

    coordinator ----> worker 1 ----> worker 2 ... ----> worker n      hidden states
         ^-----------------------------------------------'            results: the last worker's link to the coordinator

Of a stage across two machines both ranks are workers, one behind the other; the link between them has their sums, too.

Each link is measured in a session of its own, so that a failing one does not affect the others: the coordinator
connects to the workers over tcp, and it, or the first of two workers, opens the link itself, by its own transport, and
measures it (``engine.links.probe``).

*Advice.* A generated token is one row of hidden states on every link, and a result on the way back: latency decides,
and nothing is packed. A prompt's chunk is many rows: a codec pays where the link takes longer for the bytes that it
saves than the codec takes itself (``core.codecs``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from splitinfer.common.model_config import positive
from splitinfer.config import Layout as ReadLayout
from splitinfer.core.codecs import CODECS, MOST_WIDTH, NONE, bytes_per_row, is_faster, packs
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.link_transport import OVER_TCP, TCP
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.plan import TensorSpec
from splitinfer.demo import DEMO_MODELS
from splitinfer.engine.fleet.fleet import Fleet
from splitinfer.engine.fleet.local_workers import LocalWorker
from splitinfer.errors import ModelError, PeerError
from splitinfer.keyring import Keyring
from splitinfer.models.border.hidden_states import seconds_per_row
from splitinfer.models.folder.checkpoint import read_config
from splitinfer.models.folder.hub import local_snapshot
from splitinfer.models.memory import on_gpu
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import Blame, Finding, failed, passed
from splitinfer.wire.messages import Welcome
from transports import TransportError

# -- advice ------------------------------------------------------------------------------------------------------------

_USUAL_WIDTH = 4096  # values of a token, where the model is unknown


@dataclass(frozen=True, slots=True)
class RowCodec:
    """A codec for rows. ``num_bytes``: of a packed row; ``seconds``: to pack and to unpack it, both ends together."""

    name: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden states of one token: the number of values, their MLX ``dtype``, and where that is known from."""

    values: int
    dtype: str
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return bytes_per_row(NONE, self.values, self.dtype)


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """Advice on one link.

    token_seconds: what the link adds to a generated token.
    codec: the fastest one for prompts, "none" unless another is clearly faster.
    row_seconds, row_seconds_plain: what a prompt's token takes with it and without; sending is hidden where a stage
        takes longer than that to compute it.
    """

    token_seconds: float
    codec: str
    row_seconds: float
    row_seconds_plain: float


def advise(figures: LinkMeasurement, hidden: Hidden, codecs: Sequence[RowCodec]) -> LinkAdvice:
    """Return advice on a link that carries hidden states in the ``down`` direction of ``figures``.

    >>> hidden = Hidden(4096, "bfloat16", "")
    >>> found = advise(LinkMeasurement(1e-4, 1e-4, down=1e8, up=1e8), hidden, [RowCodec("int8", 4096, 4e-6)])
    >>> found.codec, found.row_seconds, found.row_seconds_plain
    ('int8', 4.496e-05, 8.192e-05)
    """
    plain = hidden.num_bytes / figures.down
    best, seconds = NONE, plain
    for codec in codecs:
        packed = codec.num_bytes / figures.down + codec.seconds
        if packed < seconds and is_faster(hidden.num_bytes, codec.num_bytes, figures.down, codec.seconds):
            best, seconds = codec.name, packed
    return LinkAdvice(figures.seconds(hidden.num_bytes), best, seconds, plain)


def hidden_of(layout: Layout) -> Hidden:
    """Return the hidden states of the layout's model if its configuration is on this machine; else a usual size.

    On a CPU the dtype "auto" is float32; elsewhere it is the model's own, which is nearly always bfloat16.
    """
    dtype = layout.dtype if layout.dtype != "auto" else "bfloat16" if on_gpu() else "float32"
    width = None if layout.model is None else _width(layout.model)
    return Hidden(_USUAL_WIDTH, dtype, "assumed") if width is None else Hidden(width, dtype, str(layout.model))


def codecs_of(hidden: Hidden) -> list[RowCodec]:
    """Return the codecs that make such rows smaller, timed here; the other end is assumed to be as fast as this
    machine."""
    if hidden.values > MOST_WIDTH:
        return []
    row = TensorSpec(hidden.dtype, (hidden.values,))
    return [
        RowCodec(name, bytes_per_row(name, hidden.values, hidden.dtype), seconds_per_row(name, row))
        for name in CODECS
        if packs(name, hidden.values, hidden.dtype)
    ]


def _width(model: str) -> int | None:
    try:
        path = DEMO_MODELS.get(model) or Path(model).expanduser()
        folder = path if path.is_dir() else local_snapshot(model)
        config = {} if folder is None else read_config(folder)
    except (ModelError, OSError, ValueError, RuntimeError):
        return None
    return positive(config, "hidden_size")


# -- the links of a layout ---------------------------------------------------------------------------------------------

SayProgress = Callable[[str], None]
_COORDINATOR = StageSpec("coordinator", 0, 0)  # without layers
_TIMEOUT = 8.0  # seconds for the link to a worker elsewhere
_SLOW_LATENCY = 2e-3  # seconds one way; Thunderbolt and Ethernet take 0.1 to 0.4, Wi-Fi several milliseconds
_SLOW_BANDWIDTH = 60e6  # bytes a second; half of what gigabit Ethernet carries
_CABLE = "connect the machines by Thunderbolt or Ethernet, and give the address of that interface"


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker, by its stage: its ``Welcome``, or why it cannot be reached."""

    name: str
    address: str
    welcome: Welcome | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A link and its figures, or why there are none. ``carries``: "hidden states", "steps" of a coordinator without
    layers, "sums" of two ranks, or "results"; ``advice``: on one that was measured and carries hidden states."""

    source: str
    target: str
    transport: str
    carries: str
    figures: LinkMeasurement | None
    problem: str = ""
    note: str = ""  # why it does not use the preferred transport
    advice: LinkAdvice | None = None


class LinkSurvey:
    def __init__(self, layout: Layout, timeout: float, notice: SayProgress) -> None:
        self._timeout, self._notice = timeout, notice
        self._chain = ((layout.stages[0] if layout.has_own_stage else _COORDINATOR), *layout.workers)
        self._locals = {spec.name: LocalWorker(spec.name) for spec in layout.workers if spec.is_local}
        self._seen: dict[str, WorkerSeen] = {}  # by name

    def run(self) -> tuple[list[WorkerSeen], list[LinkSeen]]:
        """Connect to all workers and measure every link that can be measured; end the local workers."""
        try:
            links = self._links()
        finally:
            for worker in self._locals.values():
                worker.stop()
        return [self._seen[spec.name] for spec in self._chain[1:]], links

    def _links(self) -> list[LinkSeen]:
        stages = self._chain
        links = [self._link(stage) for stage in range(1, len(stages))]
        if len(stages) > 2:
            last = replace(stages[-1], link_transport=OVER_TCP)  # whatever carries hidden states to it
            seen = LinkSeen(last.name, stages[0].name, _transport(last), "results", None)
            links.append(self._measured(seen, [last]))
        return links

    def _link(self, stage: int) -> LinkSeen:
        """Return the link that carries hidden states to a stage."""
        before, spec = self._chain[stage - 1 : stage + 1]
        carries = "sums" if before.start == spec.start < before.end else "hidden states" if before.end else "steps"
        seen = LinkSeen(before.name, spec.name, _transport(spec), carries, None)
        return self._measured(seen, [spec] if stage == 1 else [before, spec])

    def _measured(self, link: LinkSeen, needed: Sequence[StageSpec]) -> LinkSeen:
        """Return the link with its figures, or the problem. ``needed``: the worker at its end, behind the one at its
        beginning, if that is no coordinator."""
        self._notice(f"{link.source} to {link.target}")
        fleet = Fleet(Keyring().own)
        try:
            if problem := self._connect(fleet, needed):
                return replace(link, problem=problem)
            workers = fleet.workers
            found = fleet.probe(*workers) if len(workers) == 1 else fleet.probe_between(*workers)
            transport = "tcp" if found.note else link.transport
            return replace(link, figures=found.figures, note=found.note, transport=transport)
        except (PeerError, TransportError) as error:
            return replace(link, problem=str(error))
        finally:
            fleet.close("the links were measured")

    def _connect(self, fleet: Fleet, needed: Sequence[StageSpec]) -> str:
        """Connect to these workers; the first problem, or "". One that could not be reached before is not retried."""
        problems = []
        for spec in needed:
            if spec.name not in self._seen or not self._seen[spec.name].problem:
                self._seen[spec.name] = self._reach(fleet, spec)
            problems.append(self._seen[spec.name].problem)
        return next(filter(None, problems), "")

    def _reach(self, fleet: Fleet, spec: StageSpec) -> WorkerSeen:
        address = str(spec.address)
        try:
            if spec.is_local:
                address = self._locals[spec.name].address()
            fleet.connect(1, replace(spec, link_transport=OVER_TCP), address, self._timeout)
            fleet.workers[-1].spec = spec  # how the stage before it connects
        except PeerError as error:
            return WorkerSeen(spec.name, address, None, str(error))
        return WorkerSeen(spec.name, address, fleet.workers[-1].welcome)


def _transport(spec: StageSpec) -> str:
    if spec.link_transport.transport != TCP:
        return f"rdma ({spec.link_transport.backend})"
    if spec.is_local:
        return "tcp (loopback)"
    scheme = str(spec.address).partition("://")[0]
    return f"{scheme} (encrypted)" if spec.key else scheme


# -- a worker elsewhere, as a probe of selftest ------------------------------------------------------------------------


def measure(options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report the worker's answer, and whether the link to it is slow."""
    stages = [{"name": "here", "layers": 6}, {"name": "worker", "layers": 6, **options["worker"]}]
    layout = ReadLayout.from_dict({"model": "demo", "stages": stages})
    _, (link,) = LinkSurvey(layout, _TIMEOUT, lambda _: None).run()
    report(*judge_link(link))


def judge_link(link: LinkSeen) -> list[Finding]:
    """Return what the link to a worker came to."""
    figures = link.figures
    if figures is None:
        remedy = "do what the sentence says, or read the worker's log"
        return [failed("worker", Blame.WORKER, link.problem, remedy)]
    found = [passed("worker", "it answers, has the same versions, and is free")]
    slowest = min((rate for rate in (figures.down, figures.up) if math.isfinite(rate)), default=math.inf)
    rate = "more than can be measured" if math.isinf(slowest) else f"{slowest / 1e6:,.0f} MB/s"
    said = f"{1e3 * figures.latency_p50:.2g} ms one way (99 of 100: {1e3 * figures.latency_p99:.2g}), {rate}"
    numbers = {"figures": asdict(figures)}
    if figures.latency_p50 > _SLOW_LATENCY or slowest < _SLOW_BANDWIDTH:
        sentence = f"the link is slow: {said}; a cable has under 0.5 ms and over 100 MB/s, Wi-Fi is like this"
        return [*found, failed("link", Blame.SPEED, sentence, _CABLE, numbers)]
    return [*found, passed("link", said, numbers)]
