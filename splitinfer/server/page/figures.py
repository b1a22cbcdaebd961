"""The engine's counters as figures of the last seconds. Pure.

The engine's counters begin with the process, and the counters of stages with the cut of the layers. A page shows the
last seconds: the difference between two samples of one cut. Samples from before another cut are dropped.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.layout import Layout
from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.records import Rows, StepRecord
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.server.health import state_of

Stats = Mapping[str, Any]
_LEAST_SHARE = 0.0005  # of time idle; smaller shares are left out


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one time. ``at``: seconds on the coordinator's clock. ``stats``: ``LLM.stats()``. ``steps``: the
    steps that came back since the previous sample."""

    at: float
    stats: Stats
    layout: Layout
    health: PipelineHealth
    budget: KVBudget
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def stages(self) -> list[tuple[str, int, int]]:
        """Names and layers ``[start, end)``."""
        return [(spec.name, spec.start, spec.end) for spec in self.layout.stages]

    @property
    def budgets(self) -> list[int]:
        """Bytes for KV on each stage; 0 where there is no bound."""
        return [stage.budget_bytes for stage in self.budget.stages] or [0] * len(self.layout.stages)

    @property
    def is_of_one_cut(self) -> bool:
        """Whether all in it, which was read one after the other, is of the same stages."""
        names = [name for name, _, _ in self.stages]
        reported = [(stage.name, stage.start, stage.end) for stage in self.health.stages]
        counted = [stage["name"] for stage in self.stats["stages"]]
        return reported == self.stages and counted == names and len(self.budgets) == len(names)


@dataclass(frozen=True, slots=True)
class StageSeen:
    """A stage in the last seconds. Shares are of the time with at least one request under way.

    duty: share of time computing. useful: share of its rows that were kept. gaps: shares of time idle, by cause.
    kv, kv_kept: KV of running requests now, and of blocks kept for later; kv_budget: bytes for both.
    ranks: share of time computing of each machine, if the stage spans two.
    experts: share of the experts that were in memory when a layer needed them; None if all always are.
    experts_read: bytes of experts read for each token that it computed. experts_waiting: share of time that this took.
    """

    name: str
    duty: float = 0.0
    gaps: Mapping[Cause, float] = field(default_factory=dict)
    kv: int = 0
    kv_kept: int = 0
    kv_budget: int = 0
    ranks: Sequence[float] = ()
    experts: float | None = None
    experts_read: float = 0.0
    experts_waiting: float = 0.0

    def gap(self, cause: Cause) -> float:
        return self.gaps.get(cause, 0.0)


@dataclass(frozen=True, slots=True)
class PageLink:
    """A link to the next stage: milliseconds on the way, half of the frames taking less, and bytes a second.
    ``way_ms``: ``None`` where nothing was sent."""

    way_ms: float | None = None
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineSeen:
    """The pipeline in the last ``seconds``.

    under_way: share of the time with at least one request. rows: of the steps seen. void: share of the rows that
    were discarded. acceptance: share of the verified drafts that were right; ``None`` if there was no draft.
    preemptions: requests that gave up their KV.
    """

    seconds: float
    stages: Sequence[StageSeen]
    links: Sequence[PageLink] = ()
    under_way: float = 0.0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    generated_per_second: float = 0.0
    computed_per_second: float = 0.0
    rows: Rows = field(default_factory=Rows)
    void: float = 0.0
    drafter: str | None = None
    acceptance: float | None = None
    preemptions: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    health: PipelineHealth = field(default_factory=lambda: PipelineHealth(()))
    is_draining: bool = False


def seen(before: Sample, after: Sample, steps: Sequence[StepRecord], *, is_draining: bool = False) -> PipelineSeen:
    """Return the figures between two samples of one cut. ``steps``: all steps in that time."""
    seconds = max(after.at - before.at, 1e-6)
    old, new = before.stats, after.stats
    computed = new["computed_tokens"] - old["computed_tokens"]
    useful = new["useful_tokens"] - old["useful_tokens"]
    return PipelineSeen(
        seconds=seconds,
        stages=[_stage(*each, computed) for each in zip(old["stages"], new["stages"], after.budgets, strict=True)],
        links=[_link(old, new, steps, i, seconds) for i in range(1, len(new["stages"]))],
        under_way=min(1.0, (new["active_seconds"] - old["active_seconds"]) / seconds),
        running=new.get("running", 0),
        waiting=new.get("waiting", 0),
        max_running=new.get("max_running", 0),
        generated_per_second=(new["generated_tokens"] - old["generated_tokens"]) / seconds,
        computed_per_second=computed / seconds,
        rows=Rows(
            sum(step.rows.prefill for step in steps),
            sum(step.rows.decode for step in steps),
            sum(step.rows.draft for step in steps),
        ),
        void=max(0.0, 1 - useful / computed) if computed > 0 else 0.0,
        drafter=(new.get("speculation") or {}).get("drafter"),
        acceptance=_acceptance(old, new),
        preemptions=new.get("preemptions", 0) - old.get("preemptions", 0),
        ttft_ms=_milliseconds(new["ttft_seconds"]),
        itl_ms=_milliseconds(new["itl_seconds"]),
        health=after.health,
        is_draining=is_draining,
    )


def _stage(was: Stats, now: Stats, budget: int, rows: int) -> StageSeen:
    wanted, found, read, waiting = (
        now.get(name, 0) - was.get(name, 0)
        for name in ("experts_wanted", "experts_found", "experts_read", "experts_waiting")
    )
    busy = now["busy_seconds"] - was["busy_seconds"]
    gaps = {cause: now["idle_seconds"][cause.value] - was["idle_seconds"][cause.value] for cause in Cause}
    whole = busy + sum(gaps.values())
    shares = {cause: seconds / whole for cause, seconds in gaps.items() if seconds > _LEAST_SHARE * whole}
    duty = busy / whole if whole > 0 else 0.0
    ranks = zip(was.get("ranks", ()), now.get("ranks", ()), strict=False)
    spent = [one["busy_seconds"] - before["busy_seconds"] for before, one in ranks]
    return StageSeen(
        name=now["name"],
        duty=duty,
        gaps=shares,
        kv=now.get("kv_bytes", 0),
        kv_kept=now.get("kv_bytes_stored", 0),
        kv_budget=budget,
        experts=found / wanted if wanted > 0 else None,
        experts_read=read / rows if rows > 0 else 0.0,
        experts_waiting=min(1.0, waiting / whole) if whole > 0 else 0.0,
        ranks=[min(1.0, max(0.0, seconds / whole)) if whole > 0 else 0.0 for seconds in spent],
    )


def _link(old: Stats, new: Stats, steps: Sequence[StepRecord], stage: int, seconds: float) -> PageLink:
    ways = [step.visits[stage].received - step.visits[stage].sent for step in steps]
    sent = new["stages"][stage - 1]["bytes_sent"] - old["stages"][stage - 1]["bytes_sent"]
    return PageLink(1e3 * max(0.0, statistics.median(ways)) if ways else None, sent / seconds)


def _acceptance(old: Stats, new: Stats) -> float | None:
    before, after = old.get("speculation"), new.get("speculation")
    if not after:
        return None
    tried, accepted = (sum(after[name]) - (sum(before[name]) if before else 0) for name in ("tried_at", "accepted_at"))
    return accepted / tried if tried > 0 else None


def _milliseconds(times: Stats) -> float | None:
    return 1e3 * times["p50"] if times["count"] else None


# -- the documents that the page gets --------------------------------------------------------------


def pipeline_document(model: str, context: int, sample: Sample, dials: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that rarely changes: stages and links, without addresses and keys. ``dials``: the dials that
    are set."""
    stats, layout = sample.stats, sample.layout
    stages = [
        {
            "name": spec.name,
            "layers": [spec.start, spec.end],
            "state": str(state.state),
            "device": sums.get("device", ""),
            "weight_bytes": sums.get("weight_bytes", 0),
            "free_bytes": sums.get("free_bytes_when_loaded", 0),
            "kv_budget": kv,
            "sum_ms": 1e3 * sums.get("sum_seconds", 0.0),
            "ranks": [
                {"name": rank["name"], "device": rank["device"], "free_bytes": rank["free_bytes_when_loaded"]}
                for rank in sums.get("ranks", ())
            ],
        }
        for spec, state, sums, kv in zip(
            layout.stages, sample.health.stages, stats["stages"], sample.budgets, strict=True
        )
    ]
    links = [
        {
            "from": here.name,
            "to": there.name,
            "transport": "local" if there.is_local else there.link_transport.transport,
            "codec": sums.get("codec") or there.codec,
        }
        for here, there, sums in zip(layout.stages, layout.stages[1:], stats["stages"], strict=False)
    ]
    named = {"model": model, "layout": layout.name, "context": context, "dials": dict(dials)}
    return {**named, "stages": stages, "links": links}


def figures_document(seen_: PipelineSeen) -> dict[str, Any]:
    """Return all figures. The state replaces the fields that it is computed from."""
    found: dict[str, Any] = _rounded(asdict(seen_))
    for name in ("rows", "preemptions", "health", "is_draining"):
        del found[name]
    for stage in found["stages"]:
        del stage["name"]
    said = {name: getattr(seen_.health, name) for name in ("failure", "waits_for", "absent")}
    return {**found, **said, "state": state_of(seen_.health, is_draining=seen_.is_draining)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
