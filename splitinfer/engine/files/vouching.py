"""Compares what one machine has sent with what others have (``store.hearsay``).

    before a copy    with the coordinator, which may have by now what it lacked: its digests are right, and what differs
                     is dropped and copied anew
    after a copy     with the other workers that have the same tensors: what differs between two is right on neither,
                     as far as this machine can tell, so it is dropped, and a person has to say which is damaged

A digest is that of a whole tensor, SHA-256, asked for by AskDigests; both ends read all of it, so it is asked for once.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitinfer.engine.files.asking import Remote, Report, ask_digests
from splitinfer.errors import PeerError
from splitinfer.store import hearsay
from splitinfer.store.models import StoredModel
from splitinfer.store.source import Source

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suspect:
    """A part that rests on the word of ``senders``, and the numbers of its tensors."""

    path: Path
    senders: frozenset[str]
    numbers: tuple[int, ...]


def suspects(stored: StoredModel, wanted: Iterable[int]) -> list[Suspect]:
    """The parts that hold ``wanted`` tensors and rest on somebody's word."""
    noted, here, numbers = hearsay.noted(stored.folder), stored.tensors(), set(wanted)
    if not noted:
        return []
    held: dict[Path, list[int]] = {}
    for name, path in here.items():
        held.setdefault(path, []).append(stored.manifest.number_of[name])
    return [
        Suspect(path, senders, tuple(sorted(held[path])))
        for path, senders in noted.items()
        if numbers & set(held.get(path, ()))
    ]


def drop_what_differs(
    remote: Remote, stored: StoredModel, own: Source, found: Sequence[Suspect], report: Report = lambda *_: None
) -> list[Suspect]:
    """Compare suspects with a coordinator that has their tensors; return those that were dropped. ``report``: gets the
    bytes that were compared, and those to be compared.

    Raises:
        PeerError, TransportError, ModelError: it is gone, or bytes cannot be read.
    """
    dropped, done = [], 0
    total = sum(each.path.stat().st_size for each in found)
    for each in found:
        report(done, total)
        done += each.path.stat().st_size
        wrong = _first_difference(remote, stored, own, each)
        if wrong is None and set(remote.holds(stored.manifest, each.numbers)) == set(each.numbers):
            hearsay.confirm(each.path)
        elif wrong is not None:
            log.warning(
                "%s of %s, which %s sent, is not what %s has; it is copied again",
                wrong, stored.manifest.model, " and ".join(sorted(each.senders)), remote.channel.peer,
            )  # fmt: skip
            hearsay.drop(each.path)
            dropped.append(each)
    return dropped


def confirm_by(remote: Remote, stored: StoredModel, own: Source, found: Iterable[Suspect]) -> list[Suspect]:
    """Compare suspects with another worker; return those that still rest on their senders' word.

    Raises:
        PeerError: it has other bytes, and nothing tells which are right; or it is gone.
    """
    left = []
    for each in found:
        if remote.channel.sender in each.senders or not remote.holds(stored.manifest, each.numbers):
            left.append(each)
            continue
        wrong = _first_difference(remote, stored, own, each)
        if wrong is not None:
            hearsay.drop(each.path)
            raise PeerError(
                f"{remote.channel.peer} has other bytes of {wrong} than {' and '.join(sorted(each.senders))} sent, and "
                f"the coordinator has none to compare them with: one of the two copies of {stored.manifest.model} is "
                "damaged or forged; remove it there, or give the coordinator the model"
            )
        if set(remote.holds(stored.manifest, each.numbers)) == set(each.numbers):
            hearsay.confirm(each.path)
        else:
            left.append(each)
    return left


def _first_difference(remote: Remote, stored: StoredModel, own: Source, suspect: Suspect) -> str | None:
    """The first tensor of which the peer has other bytes."""
    wrong = None
    for number, digest in ask_digests(remote, stored.manifest, remote.holds(stored.manifest, suspect.numbers)):
        if wrong is None and own.digest(number) != digest:
            wrong = stored.manifest.items[number].name
    return wrong
