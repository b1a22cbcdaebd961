"""Opens, measures and closes every link of a layout, with no model loaded.

    coordinator ----> worker 1 ----> worker 2 ... ----> worker n      hidden states
         ^-----------------------------------------------'            results: the last worker's link to the coordinator

Each link is measured in a session of its own, so that a failing one does not affect the others: the coordinator
connects, sends its requests and disconnects. Between two workers, the first is asked to open the link and to measure
it; the coordinator then reaches both over tcp, whatever the link's transport, so that no RDMA group is set up for
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.link_transport import OVER_TCP, TCP
from splitinfer.core.metrics.clocks import ClockReading
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.engine.coordinator.local_workers import LocalWorker
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.errors import PeerError
from splitinfer.probes.advice import LinkAdvice
from splitinfer.wire.messages import Welcome
from transports import KeyPair, TransportError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker, by its stage: its ``Welcome``, or why it cannot be reached."""

    name: str
    address: str
    welcome: Welcome | None
    clock: ClockReading | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """A link and its figures, or why there are none. ``carries``: "hidden states" or "results"; ``advice``: on one that
    was measured and carries hidden states."""

    source: str
    target: str
    transport: str
    carries: str
    figures: LinkMeasurement | None
    problem: str = ""
    note: str = ""  # why it does not use the preferred transport
    advice: LinkAdvice | None = None


class LinkSurvey:
    def __init__(self, layout: Layout, own: Callable[[], KeyPair], timeout: float, notice: Progress) -> None:
        self._layout, self._own, self._timeout, self._notice = layout, own, timeout, notice
        self._locals = {spec.name: LocalWorker(spec.name) for spec in layout.stages[1:] if spec.is_local}
        self._seen: dict[int, WorkerSeen] = {}

    def run(self) -> tuple[list[WorkerSeen], list[LinkSeen]]:
        """Connect to all workers and measure every link that can be measured; end the local workers."""
        try:
            links = self._links()
        finally:
            for worker in self._locals.values():
                worker.stop()
        return [self._seen[stage] for stage in range(1, len(self._layout.stages))], links

    def _links(self) -> list[LinkSeen]:
        stages = self._layout.stages
        links = [self._link(stage) for stage in range(1, len(stages))]
        if len(stages) > 2:
            last = replace(stages[-1], link_transport=OVER_TCP)  # whatever carries hidden states to it
            seen = LinkSeen(last.name, stages[0].name, _transport(last), "results", None)
            links.append(self._measured(seen, [len(stages) - 1], _measure_own))
        return links

    def _link(self, stage: int) -> LinkSeen:
        """The link by which a stage receives its hidden states."""
        before, spec = self._layout.stages[stage - 1 : stage + 1]
        seen = LinkSeen(before.name, spec.name, _transport(spec), "hidden states", None)
        if stage == 1:
            return self._measured(seen, [1], _measure_own)
        return self._measured(seen, [stage - 1, stage], _measure_between)

    def _measured(
        self, link: LinkSeen, needed: Sequence[int], measure: Callable[[WorkerGroup], LinkMeasurement]
    ) -> LinkSeen:
        """The link with its figures, or the problem. ``needed``: the stages whose workers take part."""
        self._notice(f"{link.source} to {link.target}")
        notes: list[str] = []
        worker_group = WorkerGroup(lambda _: None, lambda _, progress: notes.append(progress.text), self._own)
        try:
            if problem := self._connect(worker_group, needed):
                return replace(link, problem=problem)
            for stage, clock in zip(needed, worker_group.prepare_to_measure(), strict=True):
                self._seen[stage] = replace(self._seen[stage], clock=clock)
            figures, note = measure(worker_group), " ".join(notes)
            return replace(link, figures=figures, note=note, transport="tcp" if note else link.transport)
        except (PeerError, TransportError) as error:
            return replace(link, problem=str(error))
        finally:
            worker_group.close("the links were measured")

    def _connect(self, worker_group: WorkerGroup, needed: Sequence[int]) -> str:
        """Connect to these workers; the first problem, or "". One that could not be reached before is not retried."""
        problems = []
        for stage in needed:
            if stage not in self._seen or not self._seen[stage].problem:
                self._seen[stage] = self._reach(worker_group, stage, over_tcp=len(needed) > 1)
            problems.append(self._seen[stage].problem)
        return next(filter(None, problems), "")

    def _reach(self, worker_group: WorkerGroup, stage: int, *, over_tcp: bool) -> WorkerSeen:
        spec = self._layout.stages[stage]
        address = str(spec.address)
        try:
            if spec.is_local:
                address = self._locals[spec.name].address()
            worker_group.connect(
                stage, replace(spec, link_transport=OVER_TCP) if over_tcp else spec, address, self._timeout
            )
            worker_group.workers[-1].spec = spec  # how the stage before it connects
        except PeerError as error:
            return WorkerSeen(spec.name, address, None, None, str(error))
        return WorkerSeen(spec.name, address, worker_group.workers[-1].welcome, None)


def _measure_own(worker_group: WorkerGroup) -> LinkMeasurement:
    return worker_group.measure_link(worker_group.workers[0])


def _measure_between(worker_group: WorkerGroup) -> LinkMeasurement:
    worker_group.connect_stages()
    return worker_group.measure_next(worker_group.workers[0])


def _transport(spec: StageSpec) -> str:
    if spec.link_transport.transport != TCP:
        return f"rdma ({spec.link_transport.backend})"
    if spec.is_local:
        return "tcp (loopback)"
    scheme = str(spec.address).partition("://")[0]
    return f"{scheme} (encrypted)" if spec.key else scheme
