"""Where a worker gets its weights: this machine, then the coordinator, then other workers, then the hub.

    open     a folder or a whole copy of the hub's -> the store -> the coordinator's manifest -> the hub
    fetch    for each tensor that the stage reads and that is not here, the first that has it:
             the coordinator -> the other workers, in the layout's order -> the hub
             what workers sent is compared with what others have, before and after (``vouching``)

Without the internet all but the last of each still work. What the coordinator describes must have the fingerprint that
its Load command names, in every table of tensors, before a byte of weights is asked for.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

from splitinfer.engine.files.asking import Channel, Remote, ask_manifest, copy_small, copy_tensors
from splitinfer.engine.files.vouching import Suspect, confirm_by, drop_what_differs, suspects
from splitinfer.engine.stage.supply import FromHub, Report
from splitinfer.errors import ModelError, PeerError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.copied import matches, open_stored, source_of
from splitinfer.models.hub import fetch, local_snapshot, open_local
from splitinfer.models.loader import Survey
from splitinfer.models.memory import size
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.parts import parts_of
from splitinfer.store.source import Source
from splitinfer.wire.messages import Load, Peer, Progress, Unavailable

log = logging.getLogger(__name__)

OpenReader = Callable[[Peer], AbstractContextManager[Channel]]


class PeerSupply:
    """A ``Supply`` for a worker. ``channel``: to its coordinator. ``reader``: opens a link to another worker."""

    def __init__(self, channel: Channel, store: ModelStore, reader: OpenReader) -> None:
        self._channel, self._store, self._reader = channel, store, reader
        self._coordinator: Remote | None = None

    def open(self, command: Load) -> Checkpoint:
        """As ``Supply.open``."""
        here = open_local(command.model, command.fingerprint.revision)
        if here is not None:
            return here
        stored = self._store.find(command.fingerprint.digest()) or self._begin(command)
        return FromHub().open(command) if stored is None else self._open_stored(command, stored)

    def _open_stored(self, command: Load, stored: StoredModel) -> Checkpoint:
        needed = stored.manifest.small(tokenizer=False)
        if not stored.has_files(needed):
            copy_small(self._ask_coordinator(command), stored, needed)
        return open_stored(stored, local_snapshot(command.model, command.fingerprint.revision))

    def _begin(self, command: Load) -> StoredModel | None:
        """Begin a copy, as the coordinator describes the model; ``None`` if the coordinator has none of it."""
        try:
            remote = self._ask_coordinator(command)
        except PeerError as error:
            log.info("%s", error)
            return None
        stored = self._store.begin(remote.manifest)
        copy_small(remote, stored, stored.manifest.small(tokenizer=False))
        difference = matches(remote.manifest, stored.folder, command.fingerprint)
        if difference:
            self._store.remove(stored)
            raise ModelError(f"{self._channel.peer} describes other weights than it wants to be loaded: {difference}")
        return stored

    def _ask_coordinator(self, command: Load) -> Remote:
        """What the coordinator has of the model.

        Raises:
            PeerError: nothing.
        """
        if self._coordinator is None:
            answer = ask_manifest(self._channel, command.fingerprint.digest())
            if isinstance(answer, Unavailable):
                raise PeerError(f"{self._channel.peer} has no weights to copy: {answer.reason}")
            self._coordinator = answer
        return self._coordinator

    def fetch(self, command: Load, checkpoint: Checkpoint, found: Survey, report: Report) -> Checkpoint:
        """As ``Supply.fetch``."""
        stored = self._store.find(command.fingerprint.digest())
        if checkpoint.origin is None or stored is None:
            return FromHub().fetch(command, checkpoint, found, report)
        if self._drop_what_differs(command, stored, found, report):
            checkpoint = self._open_stored(command, stored)
        missing = checkpoint.missing(found.tensors)
        if not missing:
            return checkpoint
        left = self._copy(command, stored, [stored.manifest.number_of[name] for name in missing], report)
        if left:
            self._download(command, checkpoint, [stored.manifest.items[number].name for number in left], report)
        self._ask_the_others(command, stored, found)
        return self._open_stored(command, stored)

    def _drop_what_differs(self, command: Load, stored: StoredModel, found: Survey, report: Report) -> bool:
        """Compare what others sent with what the coordinator has; whether something was dropped."""
        suspected = self._suspects(stored, found)
        if not suspected:
            return False
        try:
            remote = self._ask_coordinator(command)
        except PeerError as error:
            log.info("%s", error)
            return False
        with self._own(command, stored) as own:
            comparing = _copying(report, f"compared with {remote.channel.peer}")
            return bool(drop_what_differs(remote, stored, own, suspected, comparing))

    def _ask_the_others(self, command: Load, stored: StoredModel, found: Survey) -> None:
        """Compare what one worker sent, and the coordinator lacks, with what another has."""
        left = self._suspects(stored, found)
        with self._own(command, stored) if left else nullcontext() as own:
            for remote in self._workers(command):
                if not left or own is None:
                    return
                left = confirm_by(remote, stored, own, left)
        if left:
            log.info("%s rests on the word of %s alone", command.model, " and ".join(_senders(left)))

    def _suspects(self, stored: StoredModel, found: Survey) -> list[Suspect]:
        return suspects(stored, [stored.manifest.number_of[name] for name in found.tensors])

    def _own(self, command: Load, stored: StoredModel) -> closing[Source]:
        """What is here of the model, to be read."""
        return closing(source_of(self._open_stored(command, stored), command.model))

    def _copy(self, command: Load, stored: StoredModel, wanted: list[int], report: Report) -> list[int]:
        """Copy what other machines have; the numbers of what none has."""
        check_room(self._store, stored, wanted)
        for remote in self._remotes(command):
            numbers = remote.holds(stored.manifest, wanted)
            if numbers:
                nbytes = sum(stored.manifest.items[number].nbytes for number in numbers)
                log.info("copying %s of %s from %s", size(nbytes), command.model, remote.channel.peer)
                copy_tensors(remote, stored, numbers, _copying(report, f"from {remote.channel.peer}"))
            wanted = [number for number in wanted if number not in set(numbers)]
            if not wanted:
                break
        return wanted

    def _remotes(self, command: Load) -> Iterator[Remote]:
        """The machines that have some of the model, the coordinator first; each link is open while it is used."""
        try:
            yield self._ask_coordinator(command)
        except PeerError as error:
            log.info("%s", error)
        yield from self._workers(command)

    def _workers(self, command: Load) -> Iterator[Remote]:
        """The other workers that have some of the model."""
        for peer in command.peers:
            with ExitStack() as stack:
                try:
                    answer = ask_manifest(stack.enter_context(self._reader(peer)), command.fingerprint.digest())
                except PeerError as error:
                    log.info("%s", error)
                    continue
                if isinstance(answer, Remote):
                    yield answer

    def _download(self, command: Load, checkpoint: Checkpoint, names: list[str], report: Report) -> None:
        """Download the files that hold what nobody has."""
        files = sorted({checkpoint.tensors[name].file for name in names})
        if command.fingerprint.revision is None:
            raise ModelError(
                f"no machine of this pipeline has layers {command.start} to {command.end - 1} of {command.model} "
                f"({len(names):,} tensors in {', '.join(files[:2])} are missing)"
            )
        fetch(command.model, checkpoint, files, lambda *at: report(Progress("download", *at)))


class NoCopies(FromHub):
    """A ``Supply`` for a worker that keeps no copies."""

    def open(self, command: Load) -> Checkpoint:
        """As ``Supply.open``."""
        try:
            return super().open(command)
        except ModelError as error:
            raise ModelError(f"{error}; it was started with --models-dir none, so it copies nothing") from error


def _senders(suspected: list[Suspect]) -> list[str]:
    return sorted({sender for each in suspected for sender in each.senders})


def _copying(report: Report, text: str) -> Callable[[int, int], None]:
    return lambda done, total: report(Progress("copy", done, total, text))


def check_room(store: ModelStore, stored: StoredModel, wanted: list[int]) -> None:
    """Check that there is room for these tensors, less what an earlier copy has written.

    Raises:
        ModelError: there is none.
    """
    nbytes = sum(stored.manifest.items[number].nbytes for number in wanted)
    store.check_room(nbytes - stored.begun(parts_of(stored.manifest, wanted)))
