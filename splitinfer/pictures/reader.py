"""Pictures for one model: bytes to what its tower and its prompts take, with what was read last."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

from splitinfer.errors import ContextExceeded, RequestError
from splitinfer.pictures.decoding import Limits, decode
from splitinfer.pictures.families import Family, Prepared

_KEPT_BYTES = 256 * 2**20


class PictureReader:
    """Reads pictures; several threads may use it. A picture that comes again, as in each turn of a conversation, is not
    decoded again."""

    def __init__(self, family: Family, limits: Limits | None = None) -> None:
        self.family, self.limits = family, limits or Limits()
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, data: bytes, room: int | None = None) -> Prepared:
        """A picture for the model. ``room``: pixels that are left for it.

        Raises:
            ContextExceeded: it would have more.
            RequestError: it cannot be decoded, or not within the limits.
            NotInstalled: Pillow is missing.
        """
        name = hashlib.blake2b(data, digest_size=32).digest()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        made = self.family.prepared(decode(data, self.family.fit, self.limits, room))
        with self._lock:
            self._kept[name] = made
            while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return made

    def check_count(self, count: int) -> None:
        """Check how many pictures a request has.

        Raises:
            ContextExceeded: it has too many.
        """
        if count > self.limits.pictures:
            raise ContextExceeded(f"a request has {count} pictures; at most {self.limits.pictures} are read")

    def check_places(self, tokens: Sequence[int], count: int) -> None:
        """Check that a prompt has a placeholder for each of its pictures.

        Raises:
            RequestError: it has more or fewer.
        """
        wanted = sum(token == self.family.placeholder for token in tokens)
        if wanted != count:
            raise RequestError(
                f"the prompt has {wanted} places for pictures (token {self.family.placeholder}) and came with "
                f"{count} pictures"
            )

    def places(self, tokens: Sequence[int], pictures: Sequence[Prepared]) -> tuple[list[int], list[int]]:
        """A prompt's tokens with those of its pictures in place of its placeholders; and where each picture's begin."""
        found, starts, left = list[int](), list[int](), iter(pictures)
        for token in tokens:
            if token != self.family.placeholder:
                found.append(token)
                continue
            one = next(left)
            found += one.before
            starts.append(len(found))
            found += [*one.token_ids, *one.after]
        return found, starts
