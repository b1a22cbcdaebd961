"""The figures for all open pages: sampled once for all, and only while a page is open, so that without a page no step
is kept.

A sample needs several calls to the engine, and another thread can change the cut of the layers between them. So the cut
is read before and after the counters. A sample is valid if both cuts are the same and all figures are about the same
stages. Otherwise there is no sample yet.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from splitinfer.core.metrics.records import StepRecord
from splitinfer.llm import LLM
from splitinfer.server.page import words
from splitinfer.server.page.figures import Sample, figures_document, pipeline_document, seen
from splitinfer.server.page.timeline import joined, spans_of, written


def sample_of(llm: LLM, recent: deque[StepRecord], at: float) -> Sample | None:
    """Return the counters at ``at`` (seconds) with the steps since the last call, which are removed from ``recent``.
    Steps of another cut are left out. Return None while another cut is coming into force."""
    before = llm.layout.stages
    stats = llm.stats()  # counts the steps that have come back
    taken = [recent.popleft() for _ in range(len(recent))]
    steps = [step for step in taken if step.cut == stats["cut"]]
    sample = Sample(at, stats, llm.layout, llm.health(), llm.kv_budget, steps)
    return sample if before == sample.layout.stages and sample.is_of_one_cut else None


EVERY = 0.5  # seconds between two samples
_SPAN = 10.0  # seconds that the figures cover
_KEPT = 4  # documents for pages that are late
_MOST_STEPS = 4096  # between two samples; older ones are lost

Document = dict[str, Any]


class Feed:
    """The figures of one server, for its event loop's thread. ``clock``: seconds, the engine's.
    ``num_watching``: how many look now."""

    def __init__(
        self, llm: LLM, model: str, is_draining: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._llm, self._model, self._is_draining, self._clock = llm, model, is_draining, clock
        self._recent: deque[StepRecord] = deque(maxlen=_MOST_STEPS)
        self._samples: deque[Sample] = deque()
        self._made: deque[tuple[int, Document]] = deque(maxlen=_KEPT)
        self._num_made = self.num_watching = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.num_watching += 1
        if self.num_watching == 1:
            self._llm.watch_steps(self._recent.append)
        try:
            yield
        finally:
            self.num_watching -= 1
            if self.num_watching == 0:
                self._llm.watch_steps(None)
                self._samples.clear()
                self._made.clear()
                self._recent.clear()

    def since(self, number: int) -> list[tuple[int, Document]]:
        """Return the documents after the one of that number, oldest first, with theirs; takes a sample if it is time.
        None while another cut is just coming into force, and none of stages that are no more."""
        now = self._clock()
        if not self._samples or now - self._samples[-1].at >= EVERY:
            sample = sample_of(self._llm, self._recent, now)
            if sample is not None:
                self._num_made += 1
                self._made.append((self._num_made, self._document(sample)))
        return [each for each in self._made if each[0] > number]

    def pipeline(self) -> Document:
        """Return what does not change from one second to the next, by the last sample: ``since`` has returned
        something."""
        llm = self._llm
        return pipeline_document(self._model, llm.context_length, self._samples[-1], llm.serving_options.as_dict())

    def _document(self, sample: Sample) -> Document:
        self._add(sample)
        steps = [step for each in list(self._samples)[1:] for step in each.steps]
        figures = seen(self._samples[0], sample, steps, is_draining=self._is_draining())
        tracks = [spans_of(sample.steps, stage) for stage in range(sample.layout.num_stages)]
        return {
            **figures_document(figures),
            "words": [asdict(each) for each in words.remarks(figures)],
            "tracks": [written(joined(spans), sample.at) for spans in tracks],
        }

    def _add(self, sample: Sample) -> None:
        """Add a sample, and drop samples of another cut and samples that are too old."""
        samples = self._samples
        if samples and samples[-1].stats["cut"] != sample.stats["cut"]:
            if samples[-1].stages != sample.stages:
                self._made.clear()
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and sample.at - samples[1].at >= _SPAN:
            samples.popleft()
