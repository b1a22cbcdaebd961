"""The sources of a worker's weights: this machine, then the coordinator, then other workers, then the hub.

    open     a folder or a whole copy of the hub's -> the store -> the coordinator's manifest -> the hub
    fetch    for each tensor that the stage reads and that is not here, the first source that has it:
             the coordinator -> the other workers, in the layout's order -> the hub

Without the internet, all sources except the hub work. The coordinator's manifest must have the fingerprint of its Load
command, in every table of tensors, before the worker asks for a byte of weights.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack

from splitinfer.common.plain_text import size
from splitinfer.common.tensor_info import TensorInfo
from splitinfer.engine.stage.loader import OnLoading, WeightSource
from splitinfer.engine.weights.copying import Remote, WeightChannel, copy, copy_small, request_manifest
from splitinfer.errors import ModelError, PeerError
from splitinfer.models.folder.checkpoint import Checkpoint, matches, open_stored
from splitinfer.models.folder.hub import fetch, local_snapshot, open_local
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.wire.messages import Load, Peer, Progress, Unavailable

log = logging.getLogger(__name__)

OpenReader = Callable[[Peer], AbstractContextManager[WeightChannel]]


class FromPeers(WeightSource):
    """The source of a worker. ``channel``: its link to the coordinator. ``reader``: opens a link to another worker."""

    def __init__(self, channel: WeightChannel, store: ModelStore, reader: OpenReader) -> None:
        self._channel, self._store, self._reader = channel, store, reader
        self._coordinator: Remote | None = None

    def open(self, command: Load) -> Checkpoint:
        """Open a model, as ``WeightSource.open``."""
        here = open_local(command.model, command.fingerprint.revision)
        if here is not None:
            return here
        stored = self._store.find(command.fingerprint.digest()) or self._begin(command)
        return super().open(command) if stored is None else self._open_stored(command, stored)

    def _open_stored(self, command: Load, stored: StoredModel) -> Checkpoint:
        needed = stored.manifest.small(tokenizer=False)
        if not set(needed) <= set(stored.files()):
            copy_small(self._ask_coordinator(command), stored, needed)
        revision = command.fingerprint.revision
        return open_stored(stored, None if revision is None else local_snapshot(command.model, revision))

    def _begin(self, command: Load) -> StoredModel | None:
        """Begin a copy by the coordinator's manifest. Return None if the coordinator does not have the model."""
        try:
            remote = self._ask_coordinator(command)
        except PeerError as error:
            log.info("%s", error)
            return None
        difference = matches(remote.manifest, remote.read("config.json"), command.fingerprint)
        if difference:
            raise ModelError(f"{self._channel.peer} describes other weights than it wants to be loaded: {difference}")
        return self._store.begin(remote.manifest)

    def _ask_coordinator(self, command: Load) -> Remote:
        """Return the coordinator's manifest of the model. The coordinator answers for the model of the last request.

        Raises:
            PeerError: the coordinator does not have the model.
        """
        known = self._coordinator
        if known is None or known.manifest.fingerprint.digest() != command.fingerprint.digest():
            answer = request_manifest(self._channel, command.fingerprint.digest())
            if isinstance(answer, Unavailable):
                raise PeerError(f"{self._channel.peer} has no weights to copy: {answer.reason}")
            self._coordinator = known = answer
        return known

    def fetch(self, command: Load, checkpoint: Checkpoint, tensors: Collection[str], report: OnLoading) -> Checkpoint:
        """Copy or download tensors, as ``WeightSource.fetch``."""
        stored = self._store.find(command.fingerprint.digest())
        if checkpoint.origin is None or stored is None:
            return super().fetch(command, checkpoint, tensors, report)
        missing = [stored.manifest.by_name[name] for name in checkpoint.missing(tensors)]
        if not missing:
            return checkpoint
        left = self._copy(command, stored, missing, report)
        if left:
            self._download(command, checkpoint, left, report)
        return self._open_stored(command, stored)

    def _copy(
        self, command: Load, stored: StoredModel, wanted: list[TensorInfo], report: OnLoading
    ) -> list[TensorInfo]:
        """Copy the tensors that other machines have, and return the others."""
        for remote in self._remotes(command):
            coming = [info for info in wanted if remote.holds(info)]
            if coming:
                nbytes, text = sum(info.nbytes for info in coming), f"from {remote.channel.peer}"
                log.info("copying %s of %s %s", size(nbytes), command.model, text)

                def copied(done: int, total: int, text: str = text) -> None:
                    report(Progress("copy", done, total, text))

                def waits(nbytes: int = nbytes) -> None:
                    report(Progress("copy", 0, nbytes, "waiting for another process that copies this model"))

                copy(remote, self._store, stored, coming, copied, waits=waits)
            wanted = [info for info in wanted if not remote.holds(info)]
            if not wanted:
                break
        return wanted

    def _remotes(self, command: Load) -> Iterator[Remote]:
        """Yield the machines that have parts of the model, the coordinator first. Each link is closed after its use."""
        try:
            yield self._ask_coordinator(command)
        except PeerError as error:
            log.info("%s", error)
        for peer in command.peers:
            with ExitStack() as stack:
                try:
                    answer = request_manifest(stack.enter_context(self._reader(peer)), command.fingerprint.digest())
                except PeerError as error:
                    log.info("%s", error)
                    continue
                if isinstance(answer, Remote):
                    yield answer

    def _download(self, command: Load, checkpoint: Checkpoint, missing: list[TensorInfo], report: OnLoading) -> None:
        """Download the files of the tensors that no machine has."""
        if command.fingerprint.revision is None:
            files = sorted({info.file for info in missing})
            what, where = command.model if command.is_of_drafter else command.layers, ", ".join(files[:2])
            raise ModelError(
                f"no machine of this pipeline has {what} ({len(missing):,} tensors in {where} are missing)"
            )
        fetch(command.model, checkpoint, [info.name for info in missing], lambda *at: report(Progress("download", *at)))


class NoCopies(WeightSource):
    """The source of a worker that keeps no copies."""

    def open(self, command: Load) -> Checkpoint:
        """Open a model, as ``WeightSource.open``."""
        try:
            return super().open(command)
        except ModelError as error:
            raise ModelError(f"{error}; it was started with --models-dir none, so it copies nothing") from error
