"""Which models this machine lets others copy, and what of them is here.

A coordinator lets its workers copy the model that it runs. A worker lets admitted machines copy the model whose layers
it holds, what is in its store, and what the hub's client keeps on this machine; never a folder that was only named.
"""

from collections.abc import Callable

from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.copied import open_stored, source_of
from splitinfer.models.hub import local_snapshot, open_local
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.source import Source

Running = tuple[Checkpoint, str]  # a model, and its name


class RunningShelf:
    """The model that this machine runs, if it runs any."""

    def __init__(self, running: Callable[[], Running | None]) -> None:
        self._running = running

    def open(self, weights: str, model: str) -> Source:
        """As ``Shelf.open``."""
        found = self.find(weights, model)
        if found is None:
            raise ModelError(f"{model or 'a model with these weights'} is not here")
        return found

    def find(self, weights: str, model: str) -> Source | None:
        """The model, if it is the one that is asked for."""
        running = self._running()
        if running is None or (not weights and running[1] != model):
            return None
        source = source_of(*running)
        if weights and source.manifest.fingerprint.digest() != weights:
            source.close()
            return None
        return source


class WorkerShelf:
    """What a worker lets others copy."""

    def __init__(self, running: Callable[[], Running | None], store: ModelStore | None) -> None:
        self._running, self._store = RunningShelf(running), store

    def open(self, weights: str, model: str) -> Source:
        """As ``Shelf.open``."""
        found = self._running.find(weights, model) or self._from_store(weights, model) or _from_hub(weights, model)
        if found is None:
            raise ModelError(f"{model or 'a model with these weights'} is not here")
        return found

    def _from_store(self, weights: str, model: str) -> Source | None:
        if self._store is None:
            return None
        stored = self._store.find(weights) if weights else _only(self._store.named(model), model)
        return None if stored is None else source_of(open_stored(stored), stored.manifest.model)


def _only(found: list[StoredModel], model: str) -> StoredModel | None:
    if len(found) > 1:
        which = ", ".join(one.digest for one in found)
        raise ModelError(f"there are {len(found)} models named {model} here ({which}); ask for one of them")
    return found[0] if found else None


def _from_hub(weights: str, model: str) -> Source | None:
    """A model that the hub's client keeps here, by its hub id."""
    if weights or local_snapshot(model) is None:
        return None
    checkpoint = open_local(model)
    return None if checkpoint is None else source_of(checkpoint, model)
