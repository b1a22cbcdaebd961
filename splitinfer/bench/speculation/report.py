"""Figures of a speculation benchmark. Pure.

*speed-up*: tokens per second to those of the same stages without drafts, trial by trial.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.bench.shared.measure import Summary, ratios, summarize

SEQUENTIAL, IN_FLIGHT = "without drafts", "in flight"


@dataclass(frozen=True, slots=True)
class Trial:
    """One answer of one system.

    ``tried``, ``accepted``: drafts that were verified and accepted; ``places``: both by place in the block; ``sent``:
    drafts sent to the stages.
    """

    seconds_per_token: float
    token_ids: tuple[int, ...]
    tried: int = 0
    accepted: int = 0
    sent: int = 0
    places: tuple[tuple[int, int], ...] = ()

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


def case_document(case: Case) -> dict[str, Any]:
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
    best = case.best_synchronous
    if best is not None and IN_FLIGHT in case.trials:
        found["best_synchronous"] = best
        found["in_flight_to_best_synchronous"] = case.speed_up(IN_FLIGHT, best)
    return found
