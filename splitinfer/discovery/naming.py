"""Which worker a stage without an address means.

A worker is known by its key, not by its name: anyone may announce a name. So a stage without an address needs a key, in
the layout or in this machine's keyring under the stage's name, and means the worker whose announced fingerprint is that
key's. The name decides only between workers that share a key, which those of one machine do. A fingerprint may be
announced by somebody else, too; then the link, which is encrypted to the key itself, is not made.
"""

from collections.abc import Iterable, Sequence

from splitinfer.core.layout import StageSpec
from splitinfer.discovery.announcement import announced_name, fingerprint_of, short
from splitinfer.discovery.workers import Worker
from splitinfer.errors import LayoutError, WorkerUnreachable


def key_of(stage: StageSpec, layout: str, known: Iterable[tuple[str, str]]) -> str:
    """The key of a stage without an address. ``known``: keys and names in this machine's keyring; ``layout``: its name,
    for messages.

    Raises:
        LayoutError: there is none, or there are several.
    """
    if stage.key is not None:
        return stage.key
    keys = sorted({key for key, name in known if is_same_name(name, stage.name)})
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise LayoutError(
            f"{len(keys)} keys are known here under the name {stage.name!r}; "
            f"write the one of the stage into layout {layout}"
        )
    raise LayoutError(
        f"stage {stage.name!r} of layout {layout} has no address and no key, and a worker is found by its key: "
        "give it the key that the worker printed, or its address tcp://host:port, or local for a worker on this machine"
    )


def choose(stage: str, key: str, workers: Sequence[Worker]) -> Worker:
    """The worker that a stage's name and key mean.

    Raises:
        WorkerUnreachable: none has that key, or several have; the text says what was found instead.
    """
    fingerprint = fingerprint_of(key)
    owners = [worker for worker in workers if worker.fingerprint == fingerprint]
    if len(owners) > 1:
        owners = [worker for worker in owners if is_same_name(worker.name, stage)] or owners
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise WorkerUnreachable(
            f"{len(owners)} workers with the key of stage {stage} were found: {_places(owners)}; "
            "name the stage as one of them (splitinfer worker --name), or give it an address"
        )
    named = [worker for worker in workers if is_same_name(worker.name, stage)]
    if named:
        raise WorkerUnreachable(_another_key(stage, fingerprint, named))
    others = f"; others were found: {_places(workers)}" if workers else ""
    raise WorkerUnreachable(f"no worker with the key of stage {stage} ({short(fingerprint)}) was found{others}")


def is_same_name(one: str, other: str) -> bool:
    """Whether two names are those of one machine: without ``.local``, without regard to case.

    >>> is_same_name("Mini.local", "mini")
    True
    """
    return announced_name(one).lower() == announced_name(other).lower()


def _another_key(stage: str, fingerprint: str, named: Sequence[Worker]) -> str:
    """For workers of the stage's name that have another key than the stage's, or none."""
    open_ = [worker for worker in named if not worker.fingerprint]
    if len(open_) == len(named):
        return (
            f"the worker {stage} that was found ({_places(named)}) has no key (it runs with --insecure), but the stage "
            f"has one ({short(fingerprint)}); start it without --insecure, or give the stage its address and no key"
        )
    found = " and ".join(short(worker.fingerprint) for worker in named if worker.fingerprint)
    return (
        f"the worker {stage} that was found ({_places(named)}) has another key ({found}) than the stage "
        f"({short(fingerprint)}): it is another machine, or it was given a new key; `splitinfer pair` there prints it"
    )


def _places(workers: Sequence[Worker]) -> str:
    """Names and places of workers, at most four."""
    shown = [f"{worker.name} at {_place(worker)}" for worker in workers[:4]]
    more = len(workers) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _place(worker: Worker) -> str:
    address = worker.addresses[0] if worker.addresses else "no address"
    return f"{f'[{address}]' if ':' in address else address}:{worker.announcement.port}"
