"""Measures all machines that a model may be cut over, at the same time, and the links between them.

    coordinator ──Profile──▶ worker 1, worker 2 ...      each times a few layers; meanwhile this machine does so, too
                ◀─Profiled──
    then, one after the other:  coordinator ── worker 1, coordinator ── worker 2, worker 1 ── worker 2 ...

If this machine has RDMA, it times sums over RDMA with each worker. Two processes are started for that, because MLX
keeps a group until a process ends. Workers of one machine are measured one after the other and share its free memory.
Links are measured over tcp, in both directions; an RDMA link is at least as fast.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise

from splitinfer.common.endpoint import Endpoint, is_loopback
from splitinfer.core.layout import LOCAL, StageSpec, written
from splitinfer.core.link_transport import JACCL, OVER_TCP, RING
from splitinfer.engine.fleet.fleet import Fleet, Notice, WorkerHandle
from splitinfer.engine.fleet.local_workers import LocalWorker
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.engine.profiling.measure import Question, described, profile_here
from splitinfer.errors import PeerError, ProtocolError, WorkerLost
from splitinfer.machine.costs import Costs, sentence
from splitinfer.machine.profile import LinkProfile, MachineProfile
from splitinfer.models.memory import unloaded_bytes
from splitinfer.wire.messages import Probed, Profile, Profiled, Progress
from transports import KeyPair, TransportError, TransportUnavailable
from transports.rdma.probe import device_for

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Surveyor:
    """Measures ``workers``, each given as a stage of any layers with its name, address and key. ``here``: this
    machine's name; ``own``: returns its key pair. ``timeout``: seconds to reach a worker. ``take_local``: starts a
    worker on this machine. ``again``: ignore saved profiles. ``row``: the bytes of a row of hidden states; 0: do not
    time sums."""

    question: Question
    here: str
    workers: Sequence[StageSpec]
    own: Callable[[], KeyPair]
    timeout: float
    notice: Notice
    take_local: Callable[[str], LocalWorker]
    again: bool = False
    row: int = 0
    _locals: dict[str, LocalWorker] = field(default_factory=dict)

    def run(self) -> tuple[list[MachineProfile], list[LinkProfile]]:
        """Measure everything. Return the machines, the coordinator first and then the workers in the order given, and
        the links, each in both directions.

        Raises:
            PeerError: a worker cannot be reached, refuses, or is gone.
            ModelError, ConfigError, DeviceFailed: this machine cannot be measured.
        """
        workers = [replace(spec, link_transport=OVER_TCP) for spec in self.workers]
        self._locals = {spec.name: self.take_local(spec.name) for spec in workers if spec.is_local}
        sums = {spec.name: self._time_sums(spec) for spec in workers if self.row and not spec.is_local}
        with self._group(workers) as group:
            machines, links = self._profiles(group), list[LinkProfile]()
            for handle in group.workers:
                name = handle.spec.name
                links += self._both_ways(self.here, name, partial(group.probe, handle), sums.get(name))
        for first, second in combinations(workers, 2):
            with self._group([first, second]) as group:
                links += self._both_ways(first.name, second.name, partial(group.probe_between, *group.workers))
        return machines, links

    # -- links -------------------------------------------------------------------------------

    @contextmanager
    def _group(self, specs: Sequence[StageSpec]) -> Iterator[Fleet]:
        """Connect to some workers for the block."""
        group = Fleet(self.own)
        try:
            for stage, spec in enumerate(specs, 1):
                address = self._locals[spec.name].address() if spec.is_local else str(spec.address)
                group.connect(stage, spec, address, self.timeout)
            yield group
        except TransportError as error:
            raise WorkerLost(str(error)) from error
        finally:
            group.close(f"measured for {self.here}")

    def _time_sums(self, spec: StageSpec) -> Costs | None:
        """Return the seconds by rows of a sum over RDMA with a worker. Return None if it cannot be timed."""
        both = StageSpec(spec.name, 0, 1, across=(LOCAL, written(str(spec.address), spec.key)), sums=JACCL)
        first, second = both.ranks
        try:
            device_for(JACCL)
        except TransportUnavailable:
            return None
        process, group = LocalWorker(first.name), Fleet(self.own)
        try:
            group.connect(1, first, process.address(), self.timeout, 0)
            group.connect(1, second, group.spawn(1, second, self.timeout), self.timeout, 1)
            (few, least), (many, most) = group.time_sums(halves_of(both, insecure=False)).sums
        except (PeerError, TransportError) as error:
            log.info("sums over RDMA with %s were not timed: %s", spec.name, error)
            return None
        finally:
            group.close("sums were timed")
            process.kill()
        per_row = self.row * (most - least) / (many - few)
        return Costs.line(max(0.0, least - per_row * few / self.row), per_row)

    def _both_ways(
        self, source: str, target: str, probe: Callable[[], Probed], sums: Costs | None = None
    ) -> list[LinkProfile]:
        self.notice(f"{source} to {target}", Progress("link", 0, 0))
        figures, over = probe().figures, RING if sums is None else JACCL
        ways = (source, target, figures.down), (target, source, figures.up)
        return [LinkProfile(a, b, figures.latency_p50, speed, sums, over) for a, b, speed in ways]

    # -- machines ----------------------------------------------------------------------------

    def _profiles(self, group: Fleet) -> list[MachineProfile]:
        """Return the profiles of all machines. One worker of each machine measures at a time."""
        waiting = defaultdict[str, list[WorkerHandle]](list)
        for handle in group.workers:
            waiting[_machine_of(handle)].append(handle)
        here = waiting.pop(_HERE, [])
        for queue in waiting.values():
            self._request(queue[0])
        own = profile_here(self.here, self.question, self._own_progress(group), again=self.again)
        if here:
            self._request(here[0])
        found = self._await(group, [*waiting.values(), here])
        machines = [own, *(found[handle.stage] for handle in group.workers)]
        # Local stages get no share: a plan counts their memory together with the coordinator's.
        sharing = [self.here, *(handle.spec.name for handle in here if not handle.spec.is_local)]
        if len(sharing) == 1:
            return machines
        most = unloaded_bytes() // len(sharing)
        names = {*sharing, *(handle.spec.name for handle in here)}
        return [
            replace(each, free_bytes=min(most, each.free_bytes)) if each.name in names else each for each in machines
        ]

    def _own_progress(self, group: Fleet) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self.notice(self.here, Progress("measure", done, total))
            if not group.is_whole:
                while True:  # raises at the last message of the worker that is gone
                    group.next_message(())

        return report

    def _request(self, handle: WorkerHandle) -> None:
        question = self.question
        command = Profile(question.name, question.dtype, question.kv_format, self.again)
        handle.send(command, memoryview(described(question.checkpoint)))

    def _await(self, group: Fleet, queues: Sequence[list[WorkerHandle]]) -> dict[int, MachineProfile]:
        """Return the profiles of all workers in the queues, by stage. A worker is asked when the previous one of its
        queue has replied."""
        found = dict[int, MachineProfile]()
        following = {handle.stage: after for queue in queues for handle, after in pairwise(queue)}
        asked = [queue[0] for queue in queues if queue]
        while len(found) < sum(map(len, queues)):
            handle, message = group.next_message(asked)
            if isinstance(message, Progress):
                self.notice(handle.spec.name, message)
            elif isinstance(message, Profiled):
                found[handle.stage] = _profile(handle, message)
                asked.remove(handle)
                if (after := following.get(handle.stage)) is not None:
                    self._request(after)
                    asked.append(after)
        return found


_HERE = ""  # in place of a host's name


def _machine_of(handle: WorkerHandle) -> str:
    """Return a name of a worker's machine, by its address: the same for all workers of one machine."""
    if handle.spec.is_local or "inproc://" in handle.address:
        return _HERE
    host = Endpoint.parse(handle.address).host
    return _HERE if is_loopback(host) else host


def _profile(handle: WorkerHandle, message: Profiled) -> MachineProfile:
    try:
        found = MachineProfile.from_dict(json.loads(message.profile))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"worker {handle.spec.name} sent a profile that cannot be read: {sentence(error)}"
        ) from error
    spec = handle.spec
    return replace(found, name=spec.name, address=spec.address, key=spec.key)
