"""The controller on drafts that a real draft model made: recorded, and replayed through the live scheduler on a virtual
clock.

``recorded_drafts.json`` says of each token of 60 answers of the demo model whether its draft model had it right, behind
the answer so far: 30 passages of tales from no training text, at temperature 0 and 0.8, 161 tokens each. A draft behind
a wrong one is void, so nothing else counts. What drafts cost is made up, and like the demo pair on a CPU: a fifth of a
step, a cut of 3 + 9 layers. The *computed* speed is that of the best flight for each answer, known beforehand.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.flight import OFF, Flight, best_flight, run_seconds
from splitinfer.core.speculation.speculation import Proposal
from splitinfer.machine.costs import Costs
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator

RECORDED: dict[str, list[str]] = json.loads(Path(__file__).with_name("recorded_drafts.json").read_text())
PROMPT = 48
DRAFT, LINK, SHARE, ROW = 0.21, 0.03, 0.27, 0.04  # of a step of one row; the first stage's share of it; a row more

STAGES = tuple(Costs.line(part * (1 - ROW), part * ROW) for part in (SHARE, 1 - SHARE))
RIG = RowCosts.through(
    [{n: part * (1 + ROW * (n - 1)) for n in range(1, 17)} for part in (SHARE, 1 - SHARE)], DRAFT, LINK
)


class Replayed(Simulator):
    """A pipeline whose drafts are right where they were when recorded."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            num_groups=2, max_in_flight=3, token_budget=64, max_running=4, max_len=1024, speculates=True, num_stages=2
        )
        super().__init__(Scheduler(config), Machine(STAGES, (Hop(LINK), Hop(LINK)), (3, 9), draft=DRAFT))
        self.answers: dict[int, str] = {}

    def is_right(self, proposal: Proposal) -> bool:
        answer, place = self.answers[proposal.seq.seq_id], proposal.position + len(proposal.drafts) - PROMPT
        return place < len(answer) and answer[place] == "1"

    def ask(self, answer: str, flight: Flight | None = None) -> float:
        """Seconds a token of one request."""
        seq_id = len(self.answers)
        self.answers[seq_id] = answer
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        self.submit(self.now, Sequence(seq_id, [0] * PROMPT, params, 0, flight=flight))
        self.run()
        times = self.served[seq_id].token_times
        return (times[-1] - times[0]) / (len(times) - 1)

    def warmed_up(self) -> "Replayed":
        """Every size of a block was run, on drafts that were always wrong."""
        for flight in (Flight(1), Flight(3), Flight(7), Flight(3, 2, 2), Flight(3, 8, 2), OFF):
            self.ask("0" * 24, flight)
        return self


def computed(answer: str) -> float:
    """Seconds a token of the best flight for an answer."""
    runs = Counter(map(len, answer.split("0")[:-1]))
    tokens = sum(count * (right + 1) for right, count in runs.items())
    best = best_flight(RIG, 1 - sum(runs.values()) / tokens, 2)
    return sum(count * run_seconds(RIG, best, right) for right, count in runs.items()) / tokens


@pytest.mark.parametrize(("kind", "least"), [("greedy", 0.97), ("sampled", 0.97)])
def test_it_comes_close_to_what_is_computed(kind: str, least: float) -> None:
    answers = RECORDED[kind][1::6]
    pipeline = Replayed().warmed_up()
    live = sum(pipeline.ask(answer) for answer in answers)
    assert sum(map(computed, answers)) > least * live
    synchronous = sum(Replayed().ask(answer, Flight(2)) for answer in answers)  # the best length
    assert synchronous > 1.05 * live


def test_a_fixed_flight_is_as_fast_as_computed() -> None:
    """What is replayed is what the formulas are about."""
    answer = RECORDED["greedy"][1]
    runs = Counter(map(len, answer.split("0")[:-1]))
    tokens = sum(count * (right + 1) for right, count in runs.items())
    for flight in (Flight(2), Flight(1, 2, 2), Flight(3, 4, 2)):
        expected = sum(count * run_seconds(RIG, flight, right) for right, count in runs.items()) / tokens
        assert Replayed().ask(answer, flight) == pytest.approx(expected, rel=0.03)
