"""The stage that a worker holds: loaded for one coordinator, kept for the next, and unloaded for other layers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.profiling.measure import answer
from splitinfer.engine.stage.loader import LoadedStage, free_memory, load
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

_SUMS = 2**13, 2**20  # bytes of the timed sums: the hidden states of a token, and those of a chunk


class Abandoned(Exception):
    """The coordinator went away while the stage was being loaded."""


class StageHolder:
    """Loads a stage and measures this machine for coordinators, on the worker's thread unless a method says otherwise.

    ``model`` overrides the coordinator's name for the model. ``disk``: where KV is stored. ``access``: is told which
    readers may connect.
    """

    def __init__(self, name: str, model: str | None, disk: Disk | None, access: AccessControl) -> None:
        self._name, self._model, self._disk, self._access = name, model, disk, access
        self.stage: LoadedStage | None = None
        self._group: Pair | None = None
        self.is_rank = False
        """Whether the stage, loaded or loading, is across two machines. Any thread may read it."""

    def running(self) -> tuple[Running, ...]:
        """Return the model whose layers are held, on any thread."""
        stage = self.stage
        return () if stage is None else ((stage.checkpoint, stage.command.model),)

    def load(self, connection: Connection, command: Load, weights: Weights) -> None:
        """Load the stage that a coordinator asks for, unless it is loaded already, and reply to the coordinator."""
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
                join = partial(self._join, weights)
                return load(command, self._name, _reporter(connection), self._disk, source, join)
            except LinkClosed:
                raise Abandoned from None

    def _join(self, weights: Weights, half: Half) -> Pair:
        """Return the group with the other rank, joined now or for an earlier stage of this process."""
        self._group = self._group or join_ranks(half, weights.gather)
        return self._group

    def meet(self, connection: Connection, half: Half, weights: Weights) -> None:
        """Meet another rank, and send the coordinator the seconds of sums with it."""
        with _refusing(connection):
            with weights.source(connection):
                group = self._join(weights, half)
            few, many = (group.seconds(num_bytes // 4) for num_bytes in _SUMS)
            connection.send(Met(((_SUMS[0], few), (_SUMS[1], max(few, many)))))

    def profile(self, connection: Connection, command: Profile, frame: Frame) -> None:
        """Measure this machine. A loaded stage stays, unless measuring needs its memory."""
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
        """Finish writing KV to disk, if a stage is loaded."""
        if self.stage is not None:
            self.stage.close()


def _reporter(connection: Connection) -> Callable[[Progress], None]:
    """Return a function that sends progress to a coordinator, and raises Abandoned if the coordinator is gone."""

    def report(progress: Progress) -> None:
        if connection.link.closed is not None:
            raise Abandoned
        connection.send(progress)

    return report


@contextmanager
def _refusing(connection: Connection, *passing: type[SplitinferError]) -> Iterator[None]:
    """Refuse a coordinator's request with an error of the block, and close the link. Let ``passing`` errors pass."""
    try:
        yield
    except passing:
        raise
    except SplitinferError as error:
        log.warning("refused %s: %s", connection.name, error)
        connection.send(Refuse(str(error)))
        connection.link.close(str(error))
