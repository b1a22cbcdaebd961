"""Has the drafter make what the scheduler wishes for, and stops it when a result makes the wish void."""

import time
from collections.abc import Callable, Iterable

from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.drafts.drafters import Drafter


class Drafting:
    """Drafts on the loop's thread. ``receive`` takes in results that have come; it is called between two drafts."""

    def __init__(self, drafter: Drafter, scheduler: Scheduler, receive: Callable[[], None]) -> None:
        self._drafter, self._scheduler, self._receive = drafter, scheduler, receive

    @property
    def is_wished_for(self) -> bool:
        """Whether the next plan could contain drafts."""
        return self._scheduler.wish() is not None

    def make(self) -> None:
        """Make the drafts that the scheduler wishes for, until a result makes the wish void."""
        wish, speculation = self._scheduler.wish(), self._scheduler.speculation
        if wish is None or speculation is None:
            return
        began, made, on_device = time.monotonic(), 0, 0.0
        while wish.stands and self._drafter.prepare(wish.seq):
            self._receive()
            began = time.monotonic()
        for draft in self._drafter.drafts(wish.seq, wish.count) if wish.stands else ():
            made += 1
            on_device += draft.seconds or 0.0
            if not speculation.add(wish, draft):
                break
            self._receive()
            if not wish.stands:
                break
        speculation.took(made, on_device or time.monotonic() - began)
        self._scheduler.take(wish)

    def prepare(self) -> bool:
        """Read ahead for the sequence that is likely to get drafts next; whether there was anything to read."""
        seq = self._scheduler.drafts_next
        return seq is not None and self._drafter.prepare(seq)

    def begin_again(self, seq_ids: Iterable[int]) -> None:
        """Forget what was computed for some sequences: the device that did has failed."""
        for seq_id in seq_ids:
            self._drafter.forget(seq_id)
