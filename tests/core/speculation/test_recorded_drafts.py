"""The chooser on drafts that a real draft model made: recorded, and replayed through the live scheduler on a virtual
clock.

``recorded_drafts.json`` says of each token of 60 answers of the demo model whether its draft model had it right, behind
the answer so far: 30 passages of tales from no training text, at temperature 0 and 0.8, 161 tokens each. A draft behind
a wrong one is void, so nothing else counts. What drafts cost is made up, and like the demo pair on a CPU: a fifth of a
step, a cut of 3 + 9 layers.
"""

import json
from pathlib import Path

import pytest

from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.core.speculation.speculation import Proposal
from splitinfer.machine.costs import Costs
from tests.emulation.machine import Hop, Machine
from tests.sim.simulator import Simulator

RECORDED: dict[str, list[str]] = json.loads(Path(__file__).with_name("recorded_drafts.json").read_text())
PROMPT = 48
DRAFT, LINK, SHARE, ROW = 0.21, 0.03, 0.27, 0.04  # of a step of one row; the first stage's share of it; a row more

STAGES = tuple(Costs.line(part * (1 - ROW), part * ROW) for part in (SHARE, 1 - SHARE))
BLOCKS = (
    OFF,
    Flight(2),
    Flight(3),
    Flight(1, 1, 2),
    Flight(2, 2, 2),
    Flight(3, 3, 2),
    Flight(4, 4, 2),
    Flight(3, 8, 2),
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
        """Every size of a block was run, on drafts of which two in three were right."""
        for flight in (Flight(1), Flight(3), Flight(7), Flight(3, 2, 2), Flight(3, 8, 2), OFF):
            self.ask("110" * 8, flight)
        return self


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_it_is_as_fast_as_the_best_blocks_that_are_fixed(kind: str) -> None:
    answers = RECORDED[kind][1::6]
    pipeline = Replayed().warmed_up()
    live = sum(pipeline.ask(answer) for answer in answers)
    fixed = {flight: sum(Replayed().ask(answer, flight) for answer in answers) for flight in BLOCKS}
    assert live < 1.03 * min(fixed.values()), fixed
    assert live < 0.96 * fixed[Flight(2)], "one block at a time, of the best length"
