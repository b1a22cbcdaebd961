"""One sample of an engine that may load another cut of the layers meanwhile.

The engine says in several calls what a sample needs: counters, stages, bounds of memory. Another cut changes these one
after the other, on another thread. So the cut is read before the counters and behind them; a sample is one where both
are the same, and where all speak of the same stages. Otherwise there is none yet: the change takes a moment.
"""

from splitinfer.core.metrics.recent import RecentSteps
from splitinfer.llm import LLM
from splitinfer.server.page.figures import Cut, Sample, fits


def sample_of(llm: LLM, recent: RecentSteps, at: float) -> Sample | None:
    """What is counted at ``at`` seconds, with the steps that have come back since the last time; ``None``: another cut
    is just coming into force. Steps of another window than the counters' are left out."""
    before = _cut_of(llm)
    stats = llm.stats()  # counts the steps that have come back, which are taken then
    steps = recent.take()
    cut = _cut_of(llm)
    if before.stages != cut.stages or not fits(cut, stats):
        return None
    return Sample(at, stats, cut, [step for step in steps if step.window == stats["window"]["number"]])


def _cut_of(llm: LLM) -> Cut:
    return Cut(llm.layout, llm.health(), llm.kv_budget)
