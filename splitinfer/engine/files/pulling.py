"""Copies a model, or some of its layers, from a worker to this machine because a person asks for it."""

from dataclasses import dataclass

from splitinfer.engine.files.asking import Channel, Remote, Report, ask_manifest, copy_small, copy_tensors
from splitinfer.engine.files.supply import check_room
from splitinfer.errors import ModelError, Refused
from splitinfer.models.copied import open_stored
from splitinfer.models.loader import count_layers, survey
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.wire.messages import Unavailable

Layers = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a copy has brought. ``nbytes``: of tensors that were not here before; ``lacking``: of those that were wanted
    and that the peer has not."""

    stored: StoredModel
    nbytes: int
    lacking: int


def pull(
    channel: Channel,
    store: ModelStore,
    model: str,
    layers: Layers | None,
    report: Report,
    rate: float | None = None,
) -> Pulled:
    """Copy a model's small files, and the tensors that its ``layers`` read (``None``: all), as far as the peer has
    them. ``rate``: bytes a second, at most.

    Raises:
        ModelError: there is no room, or the layers are not the model's.
        PeerError, TransportError: the peer has no such model, is gone, or sent something else.
    """
    remote = ask_manifest(channel, "", model)
    if isinstance(remote, Unavailable):
        raise Refused(f"{channel.peer} has no weights for this machine: {remote.reason}")
    stored = store.begin(remote.manifest)
    with stored.hold():
        return _copy(remote, store, stored, layers, report, rate)


def _copy(
    remote: Remote, store: ModelStore, stored: StoredModel, layers: Layers | None, report: Report, rate: float | None
) -> Pulled:
    copy_small(remote, stored, stored.manifest.small(tokenizer=True))
    here = stored.tensors()
    numbers = [number for number in _wanted(stored, layers) if stored.manifest.items[number].name not in here]
    coming = remote.holds(stored.manifest, numbers)
    check_room(store, stored, coming)
    copy_tensors(remote, stored, coming, report, rate)
    nbytes = _bytes_of(stored, coming)
    return Pulled(stored, nbytes, _bytes_of(stored, numbers) - nbytes)


def _wanted(stored: StoredModel, layers: Layers | None) -> list[int]:
    """The numbers of the tensors that these layers read."""
    checkpoint, number_of = open_stored(stored), stored.manifest.number_of
    if layers is None:
        return list(number_of.values())
    num_layers = count_layers(checkpoint)
    if not layers[0] < layers[1] <= num_layers:
        last = layers[1] - 1
        raise ModelError(f"{stored.manifest.model} has layers 0 to {num_layers - 1}, not all of {layers[0]} to {last}")
    names = survey(checkpoint, *layers, None).tensors
    return sorted(number_of[name] for name in names)


def _bytes_of(stored: StoredModel, numbers: list[int]) -> int:
    return sum(stored.manifest.items[number].nbytes for number in numbers)
