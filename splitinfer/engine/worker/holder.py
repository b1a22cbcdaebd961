"""The stage that a worker holds: loaded for one coordinator, kept for the next, given up for another's layers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.profiling.measure import answer
from splitinfer.engine.stage.loader import Join, LoadedStage, free_memory, load
from splitinfer.engine.weights.answering import Running
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.engine.worker.ranks import join_ranks
from splitinfer.engine.worker.weights import Weights
from splitinfer.errors import CannotFit, ProtocolError, SplitinferError
from splitinfer.kvstore.store import Disk
from splitinfer.models.load.halves import Pair
from splitinfer.wire.messages import Half, Load, Met, Profile, Progress, Refuse
from transports import Frame, LinkClosed

log = logging.getLogger(__name__)

_SUMS = 2**13, 2**20  # bytes of the sums that are timed: of a token's, and of a chunk's hidden states


class Abandoned(Exception):
    """The coordinator went away while the stage was being loaded."""


class StageHolder:
    """Loads, and measures, for coordinators. Everything is on the worker's thread, unless it says otherwise.

    ``model`` overrides the coordinator's name for the model. ``disk``: where KV is stored. ``access``: told which peers
    may connect.
    """

    def __init__(self, name: str, model: str | None, disk: Disk | None, access: AccessControl) -> None:
        self._name, self._model, self._disk, self._access = name, model, disk, access
        self.stage: LoadedStage | None = None
        self._group: Pair | None = None
        self.is_rank = False
        """Whether the stage is across two machines, from when it is loaded. From any thread."""

    def running(self) -> tuple[Running, ...]:
        """Return the model whose layers are held. From any thread."""
        stage = self.stage
        return () if stage is None else ((stage.checkpoint, stage.command.model),)

    def loaded(self) -> LoadedStage:
        """Return the stage.

        Raises:
            ProtocolError: none was loaded.
        """
        if self.stage is None:
            raise ProtocolError("a step came before the stage was loaded")
        return self.stage

    def load(self, connection: Connection, command: Load, weights: Weights) -> None:
        """Load what a coordinator asks for, unless it is loaded; reply to it."""
        if self._model is not None:
            command = replace(command, model=self._model)
        self.is_rank = command.half is not None
        with _refusing(connection):
            if self.stage is None or not self.stage.serves(command):
                self.unload()
                self.stage = self._load_anew(connection, command, weights)
            self._access.let_read(command.reader_keys)
            ready = self.stage.begin_anew()
            log.info("holding layers %d to %d of %s", command.start, command.end - 1, command.model)
            connection.send(ready)

    def _load_anew(self, connection: Connection, command: Load, weights: Weights) -> LoadedStage:
        with weights.source(connection) as source:
            try:
                return load(command, self._name, _reporter(connection), self._disk, source, self._join(weights))
            except LinkClosed:
                raise Abandoned from None

    def _join(self, weights: Weights) -> Join:
        def join(half: Half) -> Pair:
            """Return the group with the other rank: joined now, or when another stage was loaded in this process."""
            self._group = self._group or join_ranks(half, weights.gather)
            return self._group

        return join

    def meet(self, connection: Connection, half: Half, weights: Weights) -> None:
        """Meet another rank, and say what sums with it take."""
        with _refusing(connection):
            with weights.source(connection):
                group = self._join(weights)(half)
            few, many = (group.seconds(num_bytes // 4) for num_bytes in _SUMS)
            connection.send(Met(((_SUMS[0], few), (_SUMS[1], max(few, many)))))

    def profile(self, connection: Connection, command: Profile, frame: Frame) -> None:
        """Measure this machine. A loaded stage stays, unless its memory is needed for that."""
        parts, report = [memoryview(part) for part in frame.parts], _reporter(connection)
        with _refusing(connection, ProtocolError):
            try:
                profiled = answer(command, parts, self._name, report)
            except CannotFit:
                if self.stage is None:
                    raise
                self.unload()
                profiled = answer(command, parts, self._name, report)
            connection.send(profiled)

    def unload(self) -> None:
        """Free the stage's memory."""
        self.close()
        self.stage = None
        free_memory()

    def close(self) -> None:
        """Write what is still to be written to disk."""
        if self.stage is not None:
            self.stage.close()


def _reporter(connection: Connection) -> Callable[[Progress], None]:
    """Return sends progress to a coordinator, and raises if it has gone away."""

    def report(progress: Progress) -> None:
        if connection.link.closed is not None:
            raise Abandoned
        connection.send(progress)

    return report


@contextmanager
def _refusing(connection: Connection, *passing: type[SplitinferError]) -> Iterator[None]:
    """Tell a coordinator why it gets no reply, unless the error is to pass."""
    try:
        yield
    except passing:
        raise
    except SplitinferError as error:
        log.warning("refused %s: %s", connection.name, error)
        connection.send(Refuse(str(error)))
        connection.link.close(str(error))
