"""Figures of a speculation benchmark, beside what theory allows. Pure.

*speed-up*: tokens per second to those of the same stages without drafts, trial by trial. *expected*: what
``core.speculation.flight`` computes for the best flight, from the seconds that drafts, steps and links took in the same
trial and from that trial's runs of accepted drafts, by simulating blocks in flight. *share*: measured to expected.
*limit*: no chain of drafts is faster, whatever verifying and drafting cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from splitinfer.bench.shared.measure import Summary, ratios, summarize
from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.speculation.flight import OFF, Flight, best_flight, run_seconds, tokens_per_second

SEQUENTIAL, IN_FLIGHT = "without drafts", "in flight"


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer of one system.

    ``tried``, ``accepted``: drafts that were verified and accepted; ``places``: both by place in the block; ``sent``:
    drafts sent to the stages. ``rig``: the seconds that steps, drafts and links took. ``runs``: by the number of drafts
    accepted in a row, how often that occurred. ``flight``: the controller's choice at the end.
    """

    seconds_per_token: float
    token_ids: tuple[int, ...]
    tried: int = 0
    accepted: int = 0
    sent: int = 0
    places: tuple[tuple[int, int], ...] = ()
    rig: RowCosts | None = None
    runs: Mapping[int, int] = field(default_factory=dict)
    flight: Flight = OFF

    @property
    def acceptance(self) -> float:
        """The share of verified drafts that were accepted."""
        return self.accepted / self.tried if self.tried else 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """One task at one setting of the drafter, with each system's trials by name."""

    name: str
    temperature: float
    trials: Mapping[str, Sequence[Trial]]

    def speed_up(self, system: str, to: str = SEQUENTIAL) -> Summary:
        """Ratios of tokens per second, ``system`` to ``to``, trial by trial."""
        mine, theirs = self.trials[system], self.trials[to]
        return ratios([t.seconds_per_token for t in theirs], [t.seconds_per_token for t in mine])

    @property
    def synchronous(self) -> list[str]:
        """The systems with one block of drafts at a time."""
        return [name for name in self.trials if name.startswith("synchronous")]

    @property
    def best_synchronous(self) -> str | None:
        """The fastest of those systems."""
        return max(self.synchronous, key=lambda name: self.speed_up(name)["median"], default=None)


def case_document(case: Case, most_in_flight: int) -> dict[str, Any]:
    """All figures of a case."""
    found: dict[str, Any] = {"case": case.name, "temperature": case.temperature, "systems": {}}
    truth = [trial.token_ids for trial in case.trials[SEQUENTIAL]]
    for name, trials in case.trials.items():
        found["systems"][name] = {
            "tokens_per_second": summarize([1 / t.seconds_per_token for t in trials]),
            "speed_up": case.speed_up(name),
            "same_tokens": sum(t.token_ids == expected for t, expected in zip(trials, truth, strict=True)),
            "of": len(trials),
            "acceptance": sum(t.accepted for t in trials) / max(1, sum(t.tried for t in trials)),
            "drafts_sent_per_token": sum(t.sent for t in trials) / sum(len(t.token_ids) for t in trials),
            "by_place": [
                [sum(tried for tried, _ in place), sum(right for _, right in place)]
                for place in zip(*(t.places for t in trials), strict=True)
            ],
            "thrown_away": 1 - sum(t.accepted for t in trials) / max(1, sum(t.sent for t in trials)),
        }
    if IN_FLIGHT in case.trials:
        found["in_flight"] = _theory(case, most_in_flight)
    best = case.best_synchronous
    if best is not None and IN_FLIGHT in case.trials:
        found["best_synchronous"] = best
        found["in_flight_to_best_synchronous"] = case.speed_up(IN_FLIGHT, best)
    return found


def _theory(case: Case, most_in_flight: int) -> dict[str, Any]:
    """Blocks in flight, beside the simulation and the limit for each trial's step times and acceptance."""
    shares, expected, limits = [], [], []
    trials = case.trials[IN_FLIGHT]
    for trial in trials:
        tokens = sum(count * (right + 1) for right, count in trial.runs.items())
        if trial.rig is None or not tokens:
            continue
        best = best_flight(trial.rig, trial.acceptance, most_in_flight)
        seconds = sum(count * run_seconds(trial.rig, best, right) for right, count in trial.runs.items()) / tokens
        if best.is_off:
            seconds = 1 / trial.rig.sequential
        shares.append(seconds / trial.seconds_per_token)
        expected.append(1 / (seconds * trial.rig.sequential))
        limits.append(trial.rig.bound(1 - sum(trial.runs.values()) / tokens) / trial.rig.sequential)
    if not shares:
        return {}
    return {
        "flight": asdict(trials[-1].flight),
        "expected_speed_up": summarize(expected),
        "share_of_expected": summarize(shares),
        "limit_speed_up": summarize(limits),
    }


# -- predictions ---------------------------------------------------------------------------------


def curve(rig: RowCosts, most_in_flight: int, acceptances: Sequence[float]) -> list[dict[str, float]]:
    """Speed-ups by acceptance: in flight and synchronous, each at its best, and the limit."""
    points = []
    for a in acceptances:
        sync = best_flight(rig, a, 1)
        flight = best_flight(rig, a, most_in_flight)
        points.append({
            "acceptance": a,
            "in_flight": tokens_per_second(rig, flight, a) / rig.sequential,
            "synchronous": tokens_per_second(rig, sync, a) / rig.sequential,
            "limit": rig.bound(a) / rig.sequential,
        })  # fmt: skip
    return points
