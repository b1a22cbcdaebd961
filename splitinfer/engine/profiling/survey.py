"""Measures all machines that a model may be cut over, at the same time, and the links between them.

    coordinator ──Profile──▶ worker 1, worker 2 ...      each times a few layers, this machine meanwhile its own
                ◀─Profiled──
    then, one after the other:  coordinator ── worker 1, coordinator ── worker 2, worker 1 ── worker 2 ...

Workers of one machine, as those that the coordinator starts itself, are measured one after the other, and share what
memory is free there. Links are measured over tcp, in both directions; an RDMA link is at least as quick.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from splitinfer.core.layout import StageSpec
from splitinfer.core.link_transport import OVER_TCP
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.engine.coordinator.local_workers import LocalWorker
from splitinfer.engine.coordinator.worker_group import WorkerGroup, WorkerHandle
from splitinfer.engine.profiling.measure import profile_here
from splitinfer.engine.profiling.question import Question, described
from splitinfer.errors import ProtocolError, WorkerLost
from splitinfer.machine.numbers import sentence
from splitinfer.machine.profile import LinkProfile, MachineProfile
from splitinfer.models.memory import unloaded_bytes
from splitinfer.wire.messages import Profile, Profiled, Progress
from transports import KeyPair, TransportError

Notice = Callable[[str, Progress], None]  # a machine's name, its progress


@dataclass(frozen=True, slots=True)
class Surveyed:
    """``machines``: the coordinator first, then the workers in the order given; ``links``: each in both directions;
    ``num_new``: how many machines were measured, and not remembered."""

    machines: tuple[MachineProfile, ...]
    links: tuple[LinkProfile, ...]
    num_new: int


class Surveyor:
    """Asks ``workers``, each a stage of any layers with its name, address and key. ``own``: this machine's key pair.
    ``timeout``: seconds to reach a worker. ``again``: measure what is remembered, too."""

    def __init__(
        self,
        question: Question,
        here: str,
        workers: Sequence[StageSpec],
        own: Callable[[], KeyPair],
        timeout: float,
        notice: Notice,
        *,
        again: bool = False,
        take_local: Callable[[str], LocalWorker],
    ) -> None:
        self._question, self._here, self._own, self._timeout = question, here, own, timeout
        self._workers = [replace(spec, link_transport=OVER_TCP) for spec in workers]
        self._notice, self._again = notice, again
        self._locals = {spec.name: take_local(spec.name) for spec in self._workers if spec.is_local}

    def run(self) -> Surveyed:
        """Measure everything.

        Raises:
            PeerError: a worker cannot be reached, refuses, or is gone.
            ModelError, ConfigError, DeviceFailed: this machine cannot be measured.
        """
        with self._group(self._workers) as group:
            profiles, num_new = self._profiles(group)
            links = self._own_links(group)
        for first, second in combinations(self._workers, 2):
            self._notice(f"{first.name} to {second.name}", Progress("link", 0, 0))
            with self._group([first, second]) as group:
                group.prepare_to_measure()
                group.connect_stages()
                links += _both_ways(first.name, second.name, group.measure_next(group.workers[0]))
        return Surveyed(tuple(profiles), tuple(links), num_new)

    # -- links -------------------------------------------------------------------------------

    @contextmanager
    def _group(self, specs: Sequence[StageSpec]) -> Iterator[WorkerGroup]:
        """A session with some workers."""
        group = WorkerGroup(lambda _event: None, lambda _stage, _progress: None, self._own)
        try:
            for stage, spec in enumerate(specs, 1):
                address = self._locals[spec.name].address() if spec.is_local else str(spec.address)
                group.connect(stage, spec, address, self._timeout)
            yield group
        except TransportError as error:
            raise WorkerLost(str(error)) from error
        finally:
            group.close("everything was measured")

    def _own_links(self, group: WorkerGroup) -> list[LinkProfile]:
        found = list[LinkProfile]()
        for handle in group.workers:
            self._notice(f"{self._here} to {handle.spec.name}", Progress("link", 0, 0))
            found += _both_ways(self._here, handle.spec.name, group.measure_link(handle))
        return found

    # -- machines ----------------------------------------------------------------------------

    def _profiles(self, group: WorkerGroup) -> tuple[list[MachineProfile], int]:
        """All machines' profiles, and how many of them are new. One worker of each machine measures at a time."""
        waiting = defaultdict[str, list[WorkerHandle]](list)
        for handle in group.workers:
            waiting[_machine_of(handle)].append(handle)
        others = [queue for machine, queue in waiting.items() if machine != _HERE]
        for queue in others:
            self._ask(queue[0])
        own, is_new = profile_here(self._here, self._question, self._own_progress(group), again=self._again)
        here = waiting[_HERE]
        if here:
            self._ask(here[0])
        found, num_new = self._await(group, [queue for queue in (*others, here) if queue])
        sharing = 1 + sum(
            not handle.spec.is_local for handle in here
        )  # a plan counts local stages with the coordinator
        machines = [own, *(found[handle.stage] for handle in group.workers)]
        is_here = [True, *(handle in here for handle in group.workers)]
        free = unloaded_bytes() // sharing
        return [
            replace(each, free_bytes=min(free, each.free_bytes)) if shares and sharing > 1 else each
            for each, shares in zip(machines, is_here, strict=True)
        ], num_new + is_new

    def _own_progress(self, group: WorkerGroup) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self._notice(self._here, Progress("measure", done, total))
            if not group.is_whole:
                while True:  # reaches the last message of the worker that is gone, and raises
                    group.next_message()

        return report

    def _ask(self, handle: WorkerHandle) -> None:
        question = self._question
        command = Profile(question.name, question.dtype, question.kv_format, self._again)
        handle.send(command, memoryview(described(question.checkpoint)))

    def _await(self, group: WorkerGroup, queues: Sequence[list[WorkerHandle]]) -> tuple[dict[int, MachineProfile], int]:
        """The profiles of all workers in the queues, by stage; of each queue one is asked when the one before it has
        replied."""
        found, num_new = dict[int, MachineProfile](), 0
        following = {handle.stage: after for queue in queues for handle, after in pairwise(queue)}
        while len(found) < sum(map(len, queues)):
            handle, message = group.next_message()
            if isinstance(message, Progress):
                self._notice(handle.spec.name, message)
            elif isinstance(message, Profiled):
                found[handle.stage] = _profile(handle, message)
                num_new += message.is_new
                if handle.stage in following:
                    self._ask(following[handle.stage])
        return found, num_new


_HERE = ""  # in place of a host's name
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def _machine_of(handle: WorkerHandle) -> str:
    """What workers of one machine have in common, as far as their addresses say."""
    host = handle.address.removeprefix("tcp://").rpartition(":")[0]
    return _HERE if handle.spec.is_local or host in _LOOPBACK or "inproc://" in handle.address else host


def _profile(handle: WorkerHandle, message: Profiled) -> MachineProfile:
    try:
        found = MachineProfile.from_dict(json.loads(message.profile))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"worker {handle.spec.name} sent a profile that cannot be read: {sentence(error)}"
        ) from error
    spec = handle.spec
    return replace(found, name=spec.name, address=spec.address, key=spec.key)


def _both_ways(source: str, target: str, figures: LinkMeasurement) -> list[LinkProfile]:
    latency = figures.latency_p50
    return [LinkProfile(source, target, latency, figures.down), LinkProfile(target, source, latency, figures.up)]
