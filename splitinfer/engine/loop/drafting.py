"""Has the drafter make the drafts that the scheduler proposes, in rounds, and stops it when results void them.

A round makes one draft for each sequence, all together. A sequence that the drafter has not read yet waits if it is
alone. Beside others it gets no drafts, and the drafter reads its prompt a chunk at a time between their steps.
"""

import time
from collections.abc import Callable

from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.speculation.speculation import Proposal, Speculation
from splitinfer.engine.device.device import Device
from splitinfer.engine.drafts.drafters import Drafter

Receive = Callable[[], None]

_CHUNKS = 1  # chunks of prompts that the drafter reads before one step of several sequences


class Drafting:
    """Makes drafts on the loop's thread, for the scheduler in force. Between two rounds it calls ``receive``, which
    handles the results that have arrived."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._read: set[int] = set()  # sequences that the drafter has read

    def use_device(self, device: Device) -> None:
        """Draft on a device from now on."""
        self._drafter.use_device(device)

    def make(self, scheduler: Scheduler, receive: Receive) -> None:
        """Make the drafts that the scheduler proposes. If a result voids some, make new ones after it at once: without
        them its token would be sent alone."""
        speculation, are_overtaken = scheduler.speculation, True
        while are_overtaken and (proposals := scheduler.proposals()):
            if ready := self._ready(proposals, scheduler, receive):
                self._draft(ready, speculation, receive)
                speculation.asked(ready)
            are_overtaken = not all(proposal.stands for proposal in proposals)
            for proposal in proposals:
                scheduler.take_drafts(proposal)

    def _ready(self, proposals: list[Proposal], scheduler: Scheduler, receive: Receive) -> list[Proposal]:
        """Return the proposals whose sequences the drafter has read. Read the rest of a single sequence first."""
        if len(scheduler.batches) > 1:
            proposals = self._read_in_turn(proposals, scheduler.speculation, receive)
        else:
            self._read_whole(proposals[0], scheduler.speculation, receive)
        return [proposal for proposal in proposals if proposal.stands]

    def _read_whole(self, proposal: Proposal, speculation: Speculation, receive: Receive) -> None:
        """Have the drafter read the rest of the only sequence."""
        began, has_read = time.monotonic(), False
        while proposal.stands and self._drafter.prepare(proposal.seq):
            has_read = True
            receive()
        if has_read:
            speculation.chooser.read(proposal.seq.seq_id, time.monotonic() - began)

    def _read_in_turn(self, proposals: list[Proposal], speculation: Speculation, receive: Receive) -> list[Proposal]:
        """Have the drafter read at most ``_CHUNKS`` chunks, and return the proposals whose sequences it has read."""
        ready, chunks = list[Proposal](), 0
        for proposal in proposals:
            seq_id = proposal.seq.seq_id
            if chunks >= _CHUNKS and seq_id not in self._read:
                continue
            began = time.monotonic()
            if self._drafter.prepare(proposal.seq):
                chunks += 1
                speculation.chooser.read(proposal.seq.seq_id, time.monotonic() - began)
                self._read.discard(seq_id)
            else:
                self._read.add(seq_id)
                ready.append(proposal)
        if chunks:
            receive()
        return ready

    def _draft(self, proposals: list[Proposal], speculation: Speculation, receive: Receive) -> None:
        """Make rounds of drafts until every proposal has its number of drafts or is void."""
        counts = [proposal.count for proposal in proposals]
        began, is_first = time.monotonic(), True
        for found in self._drafter.draft_together([proposal.seq for proposal in proposals], counts):
            drafts = [draft for draft in found if draft is not None]
            on_device = sum(draft.seconds or 0.0 for draft in drafts)
            waited = time.monotonic() - began
            made = sum(draft.seconds != 0.0 for draft in drafts)  # a draft that was looked up costs 0 s
            if made:
                # The first round may have waited for a step on the device. A later one costs all the time it took.
                took = on_device if is_first and on_device else max(on_device, waited)
                speculation.costs.drafted(made, 1, took)
            is_first = False
            for i, (proposal, draft) in enumerate(zip(proposals, found, strict=True)):
                if draft is not None and counts[i]:
                    proposal.drafts.append(draft)
            receive()
            for i, proposal in enumerate(proposals):
                if not proposal.stands:
                    counts[i] = 0
            if not any(len(proposal.drafts) < count for proposal, count in zip(proposals, counts, strict=True)):
                return
            began = time.monotonic()

    def read_ahead(self, scheduler: Scheduler) -> bool:
        """Have the drafter read a sequence that is likely to get drafts next. Return whether there was one to read."""
        return any(self._drafter.prepare(seq) for seq in scheduler.drafts_next)

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended, or whose KV was lost with the device."""
        self._read.discard(seq_id)
        self._drafter.forget(seq_id)
