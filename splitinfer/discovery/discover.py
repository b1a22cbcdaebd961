"""Finds the workers that `splitinfer discover` lists, the addresses of a layout's names and of the workers of `up`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.discovery import network
from splitinfer.discovery.announcement import fingerprint_of
from splitinfer.discovery.report import Found, Look, address_of, way_words
from splitinfer.discovery.workers import KnownWorker, Route, choose, for_both, is_here, is_same_name, is_shared, key_of
from splitinfer.errors import WorkerUnreachable
from splitinfer.keyring import Keyring, Known, same_key
from splitinfer.system.interface_kind import LocalInterface
from splitinfer.wire.messages import Versions

SECONDS = 3.0  # a responder answers within 0.12 s (RFC 6762, section 6), a sleeping Wi-Fi later
SHORTLY = 1.5  # if an address is known already; zeroconf's second question goes out after a second

OnFound = Callable[[str, str], None]
"""Called with the name of a stage or worker, and a phrase that says where it was found."""


def discover(seconds: float, known: Iterable[Known], own: Versions, own_key: str = "") -> tuple[Look, list[Found]]:
    """Return every worker that announces itself within ``seconds``, with the ways to it. ``known``: this machine's
    keyring; ``own``: this process's versions; ``own_key``: this machine's public key."""
    look, keys = network.look(seconds), tuple(known)
    found = [_found(worker, look.interfaces, keys, own) for worker in look.workers]
    mine = fingerprint_of(own_key) if own_key else None
    return look, [
        replace(each, same_key=same_key()) if each.worker.fingerprint == mine and not each.is_here else each
        for each in found
    ]


def paired(known: Sequence[Known], own: Versions) -> list[dict[str, str]]:
    """Return name, address and key of the workers that announce themselves now, answer, and have a key of the keyring.
    The search ends early once all of them were heard; with an empty keyring it does not start."""
    keys = {fingerprint_of(each.key): each.key for each in known}
    if not keys:
        return []
    look = network.look(SECONDS, lambda seen: keys.keys() <= {each.fingerprint for each in seen})
    found = [_found(worker, look.interfaces, known, own) for worker in look.workers]
    return [
        {"name": each.worker.name, "address": each.address, "key": keys[each.worker.fingerprint]}
        for each in found
        if each.address is not None and each.difference is None and each.worker.fingerprint in keys
    ]


def find_stages(layout: Layout, notice: OnFound = lambda _stage, _text: None) -> Layout:
    """Return the layout with an address for each worker that has none; the same layout if all have one.

    Raises:
        LayoutError: a stage's key is not known.
        WorkerUnreachable: a worker was not found or does not answer; the text names the attempts.
    """
    if not layout.to_find:
        return layout
    known = [(each.key, each.name) for each in Keyring().known()]
    keys = {stage.name: key_of(stage, layout.name, known) for stage in layout.to_find}
    look = network.look(SECONDS, lambda seen: bool(_chosen(keys, seen)))
    try:
        workers = {name: choose(name, key, look.workers) for name, key in keys.items()}
    except WorkerUnreachable as error:
        tried = look.problem if look.workers else look.words
        raise WorkerUnreachable("; ".join(filter(None, (str(error), tried)))) from None
    found: dict[str, tuple[str, str]] = {}
    for before, stage in zip(layout.stages, layout.stages[1:], strict=False):
        if stage.name in keys:
            way = _way_to(workers[stage.name], workers.get(before.name), look.interfaces)
            found[stage.name] = (address_of(way, workers[stage.name]), keys[stage.name])
            notice(stage.name, f"found at {found[stage.name][0]} by {way_words(way)}")
    return layout.with_found(found)


def find_again(stage: StageSpec) -> str | None:
    """Return the address at which the worker with a stage's key announces itself now and answers. Return None if it
    does not, or if the stage has no key."""
    if stage.key is None:
        return None
    keys = {stage.name: stage.key}
    look = network.look(SHORTLY, lambda seen: bool(_chosen(keys, seen)))
    worker = _chosen(keys, look.workers).get(stage.name)
    try:
        return None if worker is None else address_of(_way_to(worker, None, look.interfaces), worker)
    except WorkerUnreachable:
        return None


def best_addresses(
    workers: Iterable[tuple[str, str, str]], notice: OnFound = lambda _name, _text: None
) -> dict[str, str]:
    """Return the best address of each worker, by name. ``workers``: the names, keys and one known address of each.

    A short search finds their announcements. The best address that answers is taken if all the other workers can reach
    it, too, because any of them may become the stage before it. Otherwise the known address stays. ``notice`` is called
    for each worker that gets another address.
    """
    known = {name: (key, address) for name, key, address in workers}
    keys = {name: key for name, (key, _) in known.items()}
    look = network.look(SHORTLY, lambda found: bool(_chosen(keys, found)))
    met, found = _chosen(keys, look.workers), {name: address for name, (_, address) in known.items()}
    for name, worker in met.items():
        others = [each.addresses for other, each in met.items() if other != name]
        reached = (way for way in network.ways_of(worker, look.interfaces) if way.seconds is not None)
        best = next((way for way in reached if is_shared(way, others)), None)
        if best is not None and address_of(best, worker) != found[name]:
            found[name] = address_of(best, worker)
            notice(name, f"found at {found[name]} by {way_words(best)}")
    return found


def _chosen(keys: dict[str, str], workers: Sequence[KnownWorker]) -> dict[str, KnownWorker]:
    """Return each name's worker if all of them were seen, else an empty dict."""
    try:
        return {name: choose(name, key, workers) for name, key in keys.items()}
    except WorkerUnreachable:
        return {}


def _way_to(worker: KnownWorker, before: KnownWorker | None, interfaces: Sequence[LocalInterface]) -> Route:
    """Return the best way to a worker. ``before``: the worker that will connect to it, unless this machine does."""
    ways = network.ways_of(worker, interfaces)
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


def _found(worker: KnownWorker, interfaces: Sequence[LocalInterface], known: Sequence[Known], own: Versions) -> Found:
    owners = [each for each in known if worker.fingerprint and fingerprint_of(each.key) == worker.fingerprint]
    named = [each for each in known if is_same_name(each.name, worker.name)]
    return Found(
        worker,
        network.ways_of(worker, interfaces),
        known_as=owners[0].name or worker.name if owners else "",
        is_impostor=bool(named) and not owners,
        is_here=is_here(worker, interfaces),
        difference=own.difference(worker.announcement.versions),
    )
