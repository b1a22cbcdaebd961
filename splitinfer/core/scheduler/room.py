"""When there is room in the queue again: what a client is told that is turned away because it is full.

A place comes free when a running request ends. Nobody knows when; but if it has as many tokens to go as answers had on
average so far, it ends with the next one with the chance of one in so many. So the requests that run together end at

    rate = sum of 1 / min(mean answer, tokens that it may still have)      a token of each

A token of each takes a cycle, which the cost model predicts (`core.costs`), and whoever takes a place has a prompt to
be read, in the same steps:

    seconds a place = cycle / rate + mean prompt * seconds a prompt's token

The n-th client that is turned away is told the time of n places. Told the same time, all would come back at once, for
one place.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.sequence import Sequence

LEAST, MOST = 1.0, 60.0  # seconds; the official clients of OpenAI's API wait for two minutes at most


@dataclass(frozen=True, slots=True)
class UsualRequest:
    """What requests had on average so far, in tokens: of an ``answer``, and of a ``prompt`` without what was cached.
    0: none has ended yet."""

    answer: float = 0.0
    prompt: float = 0.0


def seconds_until_room(
    running: Seq[Sequence], config: SchedulerConfig, costs: CostModel, usual: UsualRequest, nth: int = 1
) -> float:
    """Return the seconds until ``nth`` places are free, between ``LEAST`` and ``MOST``."""
    rate = sum(1.0 / _tokens_to_go(seq, config, usual) for seq in running)
    if not rate:
        return LEAST
    rows = -(-len(running) // config.num_groups)
    position = sum(len(seq.tokens) for seq in running) // len(running)
    cycle = costs.cycle(Shape.of_single_rows([position] * rows), min(config.num_groups, len(running)))
    reading = usual.prompt * costs.slowest(Shape().plus(0, config.token_budget)) / config.token_budget
    return min(max(LEAST, nth * (cycle / rate + reading)), MOST)


def _tokens_to_go(seq: Sequence, config: SchedulerConfig, usual: UsualRequest) -> float:
    """Return the tokens until a sequence ends, on average."""
    most = max(1, config.longest(seq) - len(seq.tokens))
    return min(max(1.0, usual.answer), most) if usual.answer else most
