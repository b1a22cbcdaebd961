"""Where a stage that is loaded gets its weights."""

from collections.abc import Callable, Collection
from typing import Protocol

from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import fetch, open_model
from splitinfer.wire.messages import Load, Progress

Report = Callable[[Progress], None]


class WeightSource(Protocol):
    """Finds a model, and brings the tensors that a stage of it reads to this machine."""

    def open(self, command: Load) -> Checkpoint:
        """The model that a command names; its weights may still be missing. Raises ModelError, PeerError."""
        ...

    def fetch(self, command: Load, checkpoint: Checkpoint, tensors: Collection[str], report: Report) -> Checkpoint:
        """The same, with these tensors on this machine. Raises ModelError, PeerError."""
        ...


class FromHub:
    """This machine's own files, and the hub."""

    def open(self, command: Load) -> Checkpoint:
        """As ``WeightSource.open``."""
        return open_model(command.model)

    def fetch(self, command: Load, checkpoint: Checkpoint, tensors: Collection[str], report: Report) -> Checkpoint:
        """As ``WeightSource.fetch``."""
        missing = checkpoint.missing(tensors)
        if missing and checkpoint.origin is not None:
            layers = "" if command.is_of_drafter else f" --layers {command.start}-{command.end - 1}"
            remedy = f"splitinfer models pull {command.model} --from ADDRESS{layers}"
            raise ModelError(f"this machine lacks tensors of {command.model}; copy these, too: {remedy}")
        files = sorted({checkpoint.tensors[name].file for name in missing})
        fetch(command.model, checkpoint, files, lambda *at: report(Progress("download", *at)))
        return checkpoint
