"""Every sequence's caches on this stage: opened, rolled back and freed as the plans say."""

from dataclasses import dataclass

from splitinfer.errors import ProtocolError
from splitinfer.models.caches import trim
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.step import nbytes


@dataclass(slots=True)
class _Entry:
    caches: SequenceCaches

    @property
    def position(self) -> int:
        return self.caches.place.position


class KVPool:
    """Caches by sequence id. Obeys; decides nothing."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self._entries: dict[int, _Entry] = {}

    def open(self, seq_id: int, parent: int | None = None) -> None:
        """Begin a sequence, empty or with the caches of ``parent``, which is then gone.

        Raises:
            ProtocolError: it is here already, or the parent is not.
        """
        if seq_id in self._entries:
            raise ProtocolError(f"sequence {seq_id} was opened twice")
        if parent is None:
            self._entries[seq_id] = _Entry(self._model.make_caches())
            return
        if parent not in self._entries:
            raise ProtocolError(f"sequence {seq_id} is to continue {parent}, which is not here")
        self._entries[seq_id] = self._entries.pop(parent)

    def at(self, seq_id: int, start: int) -> SequenceCaches:
        """The sequence's caches, rolled back to ``start`` tokens.

        Raises:
            ProtocolError: the sequence is not here, has not come that far, or cannot go back.
        """
        entry = self._entries.get(seq_id)
        if entry is None:
            raise ProtocolError(f"the plan runs sequence {seq_id}, which was never opened")
        back = entry.position - start
        if back < 0:
            raise ProtocolError(f"the plan runs sequence {seq_id} from {start}, but it stands at {entry.position}")
        if back > 0:
            self._rewind(entry, seq_id, back)
        return entry.caches

    def _rewind(self, entry: _Entry, seq_id: int, back: int) -> None:
        entry.caches.release()
        if not all(trim(cache, back) for cache in entry.caches.own):
            raise ProtocolError(f"the caches of sequence {seq_id} cannot go back {back} tokens")
        entry.caches.place.position -= back

    def free(self, seq_id: int) -> None:
        """Forget a sequence; unknown ones are no error, because freeing twice is the same as once."""
        entry = self._entries.pop(seq_id, None)
        if entry is not None and entry.caches.cohort is not None:
            entry.caches.cohort.forget(entry.caches)

    def clear(self) -> None:
        """Forget every sequence."""
        self._entries.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences."""
        return nbytes([entry.caches for entry in self._entries.values()])

    def __len__(self) -> int:
        return len(self._entries)
