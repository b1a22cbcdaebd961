"""Looks around for workers, and gives a layout's names their addresses."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from splitinfer.core.layout import Layout
from splitinfer.discovery import naming
from splitinfer.discovery.announcement import fingerprint_of
from splitinfer.discovery.choosing import Way, for_both, is_shared
from splitinfer.discovery.means import Means, MeansFailed, means_here
from splitinfer.discovery.measuring import ways_to
from splitinfer.discovery.overhearing import Overhearing
from splitinfer.discovery.result import Discovery, Found, Tried, address_of
from splitinfer.discovery.sentences import in_one, way_words
from splitinfer.discovery.workers import Merged, Sighting, Worker, is_here, merge, without_own
from splitinfer.errors import WorkerUnreachable
from splitinfer.keyring import Keyring, Known
from splitinfer.system.interface_kind import LocalInterface
from splitinfer.system.interfaces import local_interfaces
from splitinfer.wire.messages import Versions

SECONDS = 3.0  # a responder answers within 0.12 s (RFC 6762, section 6), a sleeping Wi-Fi later
SHORTLY = 1.0  # where an address is known already
_MOST_SIGHTINGS = 4096  # a stranger may announce any number

IsEnough = Callable[[Sequence[Worker]], bool]


class Surroundings:
    """What a look around asks: this machine's interfaces and means, and connections. ``means``: ``None`` where it has
    none."""

    def __init__(
        self,
        means: Means | None,
        interfaces: Sequence[LocalInterface],
        overhearing: Callable[[Sequence[LocalInterface]], Overhearing] = Overhearing,
        ways: Callable[[Worker, Sequence[LocalInterface]], tuple[Way, ...]] = ways_to,
    ) -> None:
        self.means, self.interfaces, self.overhearing, self.ways = means, tuple(interfaces), overhearing, ways

    @classmethod
    def here(cls) -> "Surroundings":
        """Those of this machine."""
        return cls(means_here(), local_interfaces())

    def look(self, seconds: float, is_enough: IsEnough) -> tuple[Merged, tuple[Tried, ...], float, str]:
        """Browse for ``seconds`` at most: the workers, what was tried, how long it took, and why it failed, or ""."""
        begun = time.monotonic()
        if self.means is None or not self.interfaces:
            return Merged(()), tuple(Tried(each) for each in self.interfaces), 0.0, ""
        sightings, problem = _Sightings(begun + seconds, is_enough), ""
        with self.overhearing(self.interfaces) as overhearing:
            try:
                self.means.browse(self.interfaces, sightings.put, sightings.are_over)
            except MeansFailed as error:
                problem = str(error)
        tried = tuple(Tried(each.interface, len(each.sources), each.problem) for each in overhearing.heard)
        return merge(sightings.seen), tried, time.monotonic() - begun, problem


def discover(surroundings: Surroundings, seconds: float, known: Iterable[Known], own: Versions) -> Discovery:
    """Every worker that announces itself within ``seconds``, with the ways to it. ``known``: this machine's keyring;
    ``own``: this process's versions."""
    merged, tried, took, problem = surroundings.look(seconds, lambda _: False)
    keys = tuple(known)
    found = tuple(_found(worker, surroundings, keys, own) for worker in merged.workers)
    means = "" if surroundings.means is None else surroundings.means.name
    return Discovery(means, took, tried, found, merged.stale, problem)


def find_stages(
    layout: Layout,
    keyring: Keyring | None = None,
    seconds: float = SECONDS,
    surroundings: Surroundings | None = None,
    notice: Callable[[str, str], None] = lambda _stage, _text: None,
) -> Layout:
    """The layout with an address for each worker that has none; the same layout if all have one. ``notice``: gets a
    stage's name, and where it was found.

    Raises:
        LayoutError: a stage's key is not known.
        WorkerUnreachable: a worker was not found, or does not answer; the text says what was tried.
    """
    if not layout.to_find:
        return layout
    known = [(each.key, each.name) for each in (keyring or Keyring()).known()]
    keys = {stage.name: naming.key_of(stage, layout.name, known) for stage in layout.to_find}
    around = surroundings or Surroundings.here()
    merged, tried, took, problem = around.look(seconds, lambda workers: _are_there(keys, workers))
    means = "" if around.means is None else around.means.name
    tried_words = "" if merged.workers else in_one(Discovery(means, took, tried, problem=problem))
    workers: dict[str, Worker] = {}
    for name, key in keys.items():
        try:
            workers[name] = naming.choose(name, key, merged.workers)
        except WorkerUnreachable as error:
            raise WorkerUnreachable("; ".join(filter(None, (str(error), tried_words or problem)))) from None
    found: dict[str, tuple[str, str]] = {}
    for before, stage in zip(layout.stages, layout.stages[1:], strict=False):
        if stage.name in keys:
            way = _way_to(workers[stage.name], workers.get(before.name), around)
            found[stage.name] = (address_of(way, workers[stage.name]), keys[stage.name])
            notice(stage.name, f"found at {found[stage.name][0]} by {way_words(way)}")
    return layout.with_found(found)


def best_addresses(
    workers: Iterable[tuple[str, str, str]],
    seconds: float = SHORTLY,
    surroundings: Surroundings | None = None,
    notice: Callable[[str, str], None] = lambda _name, _text: None,
) -> dict[str, str]:
    """The best address of each worker, by name, of workers whose names, keys and one address are known.

    What a worker announces is looked for shortly. The best of its addresses that answers is taken, if all the other
    workers can reach it, too: any of them may come to stand before it. Else it is the known one. ``notice``: gets the
    name of a worker that another address is taken for, and which.
    """
    known = {name: (key, address) for name, key, address in workers}
    keys = {name: key for name, (key, _) in known.items()}
    around = surroundings or Surroundings.here()
    seen = around.look(seconds, lambda found: _are_there(keys, found))[0].workers if known else ()
    try:
        met = {name: naming.choose(name, key, seen) for name, key in keys.items()}
    except WorkerUnreachable:
        met = {}
    found = {name: address for name, (_, address) in known.items()}
    for name, worker in met.items():
        others = [each.addresses for other, each in met.items() if other != name]
        ways = around.ways(without_own(worker, around.interfaces), around.interfaces)
        best = next((way for way in ways if way.seconds is not None and is_shared(way, others)), None)
        if best is not None and address_of(best, worker) != found[name]:
            found[name] = address_of(best, worker)
            notice(name, f"found at {found[name]} by {way_words(best)}")
    return found


class _Sightings:
    """What was seen so far; both methods may be called from any thread."""

    def __init__(self, until: float, is_enough: IsEnough) -> None:
        self._until, self._is_enough = until, is_enough
        self._lock = threading.Lock()
        self._seen: list[Sighting] = []
        self._num_judged = 0
        self._has_enough = False

    def put(self, sighting: Sighting) -> None:
        with self._lock:
            if len(self._seen) < _MOST_SIGHTINGS:
                self._seen.append(sighting)

    def are_over(self) -> bool:
        seen = self.seen
        if len(seen) != self._num_judged:
            self._num_judged, self._has_enough = len(seen), self._is_enough(merge(seen).workers)
        return self._has_enough or time.monotonic() >= self._until

    @property
    def seen(self) -> tuple[Sighting, ...]:
        with self._lock:
            return tuple(self._seen)


def _are_there(keys: dict[str, str], workers: Sequence[Worker]) -> bool:
    """Whether each stage's worker is among those that were seen."""
    try:
        for name, key in keys.items():
            naming.choose(name, key, workers)
    except WorkerUnreachable:
        return False
    return True


def _way_to(worker: Worker, before: Worker | None, around: Surroundings) -> Way:
    """The best way to a worker. ``before``: the worker that will connect to it, where it is none of this machine."""
    ways = around.ways(without_own(worker, around.interfaces), around.interfaces)
    if before is not None and before.addresses != worker.addresses:
        reached = [way for way in ways if way.seconds is not None]
        ways = for_both(reached, before.addresses) if reached else ways
    if not ways or ways[0].seconds is None:
        why = "; ".join(f"{way.address}: {way.problem}" for way in ways) or "it announced no address"
        raise WorkerUnreachable(
            f"worker {worker.name} announces itself, but does not answer ({why}): its machine is off or asleep, it was "
            "killed, or a firewall keeps connections out"
        )
    return ways[0]


def _found(worker: Worker, around: Surroundings, known: Sequence[Known], own: Versions) -> Found:
    owners = [each for each in known if worker.fingerprint and fingerprint_of(each.key) == worker.fingerprint]
    named = [each for each in known if naming.is_same_name(each.name, worker.name)]
    return Found(
        worker,
        around.ways(without_own(worker, around.interfaces), around.interfaces),
        known_as=owners[0].name or worker.name if owners else "",
        is_impostor=bool(named) and not owners,
        is_here=is_here(worker, around.interfaces),
        difference=own.difference(worker.announcement.versions),
    )
