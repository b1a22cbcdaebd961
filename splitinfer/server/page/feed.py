"""The figures for all pages that look: sampled once for all of them, and only while somebody looks.

Whoever asks first after ``EVERY`` seconds has the sample taken; the others get what was made of it. So a hundred pages
cost the engine what one does, and none costs it anything: then not even single steps are noted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from splitinfer.core.metrics.recent import RecentSteps, SeenStep
from splitinfer.llm import LLM
from splitinfer.server.page import words
from splitinfer.server.page.documents import figures_document, pipeline_document
from splitinfer.server.page.figures import Sample, Seen, is_later, seen
from splitinfer.server.page.timeline import joined, spans_of, written

EVERY = 0.5  # seconds between two samples
_SPAN = 10.0  # seconds that the figures are of
_KEPT = 4  # documents for pages that are late

Document = dict[str, Any]


class Feed:
    """The figures of one server, for its event loop's thread. ``clock``: seconds, the engine's."""

    def __init__(
        self, llm: LLM, model: str, is_draining: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._llm, self._model, self._is_draining, self._clock = llm, model, is_draining, clock
        self._recent = RecentSteps()
        self._samples: deque[Sample] = deque()
        self._made: deque[tuple[int, Document]] = deque(maxlen=_KEPT)
        self._num_made = self._num_watching = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody looks."""
        self._num_watching += 1
        if self._num_watching == 1:
            self._llm.watch_steps(self._recent)
        try:
            yield
        finally:
            self._num_watching -= 1
            if self._num_watching == 0:
                self._llm.watch_steps(None)
                self._samples.clear()
                self._made.clear()
                self._recent.take()

    def pipeline(self) -> Document:
        """What does not change from one second to the next, by the last sample."""
        llm, stats = self._llm, self._samples[-1].stats if self._samples else self._llm.stats()
        return pipeline_document(self._model, llm.layout, llm.context_length, stats, llm.health(), llm.kv_budget)

    def since(self, number: int) -> list[tuple[int, Document]]:
        """The documents after the one of that number, oldest first, with theirs; takes a sample if it is time."""
        now = self._clock()
        if not self._samples or now - self._samples[-1].at >= EVERY:
            self._num_made += 1
            self._made.append((self._num_made, self._sample(now)))
        return [each for each in self._made if each[0] > number]

    def _sample(self, now: float) -> Document:
        stats = self._llm.stats()  # counts the steps that have come back, which are taken then
        sample = Sample(now, stats, self._recent.take())
        if self._samples and not is_later(self._samples[-1].stats, stats):
            self._samples.clear()
        self._samples.append(sample)
        while len(self._samples) > 2 and now - self._samples[1].at >= _SPAN:
            self._samples.popleft()
        figures = self._seen()
        return {
            **figures_document(figures),
            "words": words.written(words.sayings(figures)),
            "tracks": self._tracks(sample.steps, now),
        }

    def _seen(self) -> Seen:
        before, after = self._samples[0], self._samples[-1]
        steps = [step for sample in list(self._samples)[1:] for step in sample.steps]
        return seen(
            before, after, steps, self._llm.health(), self._llm.kv_budget, is_draining=self._is_draining()
        )  # fmt: skip

    def _tracks(self, steps: list[SeenStep], now: float) -> list[list[list[Any]]]:
        stages = range(self._llm.layout.num_stages)
        return [written(joined(spans_of(steps, stage)), now) for stage in stages]
